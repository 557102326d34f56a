"""The locks of stages, and torn stages, whose change failed halfway."""

import threading

import pytest

from headwater.core.errors import DeviceFullError, DiskFullError, StoreError
from headwater.store.locks import StageLocks


def test_a_change_that_fails_leaves_the_stage_torn_until_it_is_replaced():
    locks = StageLocks(["first", "second"])
    with pytest.raises(DiskFullError), locks.whole(0), locks.changing(0):
        raise DiskFullError("no room")
    with pytest.raises(StoreError, match="'first' failed halfway: no room"), locks.whole(0):
        pass
    with locks.whole(1):
        pass
    with locks.exclusive(0):
        locks.mend(0)
    with locks.whole(0):
        pass


def test_a_change_that_is_interrupted_leaves_the_stage_torn():
    locks = StageLocks(["first"])
    with pytest.raises(KeyboardInterrupt), locks.whole(0), locks.changing(0):
        raise KeyboardInterrupt
    with pytest.raises(StoreError, match="it was interrupted"), locks.whole(0):
        pass


def test_a_torn_stage_names_an_error_of_another_package_too():
    locks = StageLocks(["first"])
    with pytest.raises(ZeroDivisionError), locks.whole(0), locks.changing(0):
        raise ZeroDivisionError("in the optimizer")
    with pytest.raises(StoreError, match=r"halfway: ZeroDivisionError\('in the optimizer'\)"), locks.whole(0):
        pass


def test_a_lock_blocks_only_threads_that_need_the_same_stage():
    locks, order = StageLocks(["first", "second"]), []

    def other():
        with locks.whole(1):
            order.append("second")
        with locks.whole(0):
            order.append("first")

    with locks.exclusive(0), locks.whole(0):  # a thread may take a lock several times
        thread = threading.Thread(target=other)
        thread.start()
        while not order:
            pass
        order.append("held")
    thread.join()
    assert order == ["second", "held", "first"]


def test_a_stage_whose_update_waits_for_memory_is_not_torn():
    locks = StageLocks(["first"])
    with pytest.raises(DeviceFullError), locks.whole(0), locks.changing(0):
        raise DeviceFullError("no memory")
    with locks.whole(0):
        pass
