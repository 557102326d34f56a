"""The thread that adds gradients to sums: order, backlog and errors."""

import threading

import pytest

from headwater.store.gradients.additions import AdditionThread, LaterAdditions


@pytest.fixture
def additions():
    thread = AdditionThread(limit_bytes=10)
    yield thread
    thread.close()


def test_additions_run_in_the_order_of_their_submission(additions):
    done = []
    for number in range(20):
        additions.submit(lambda number=number: done.append(number), 0)
    additions.finish()
    assert done == list(range(20))


def test_draining_blocks_until_at_most_the_limit_waits(additions):
    gates = [threading.Event() for _ in range(3)]
    for gate in gates:
        additions.submit(lambda gate=gate: gate.wait(20), 6)
    assert additions.is_backlogged()
    for gate in gates[:2]:
        gate.set()
    additions.drain()
    assert not additions.is_backlogged()
    gates[2].set()
    additions.finish()


def test_finish_raises_the_error_of_an_addition(additions):
    def fail():
        raise ValueError("no memory")

    additions.submit(fail, 0)
    with pytest.raises(ValueError, match="no memory"):
        additions.finish()


def test_a_failed_addition_does_not_count_as_waiting(additions):
    def fail():
        raise ValueError("no memory")

    additions.submit(fail, 11)
    with pytest.raises(ValueError, match="no memory"):
        additions.drain()
    assert not additions.is_backlogged()
    additions.drain()


def test_abandon_blocks_until_all_additions_have_ended_and_drops_their_errors(additions):
    def fail():
        raise ValueError("no memory")

    gate, done = threading.Event(), []
    for add in (gate.wait, fail, lambda: done.append(True)):
        additions.submit(add, 6)
    threading.Timer(0.05, gate.set).start()
    additions.abandon()
    assert done == [True]
    additions.finish()
    assert not additions.is_backlogged()


def test_later_additions_run_in_their_order_on_the_calling_thread_above_the_limit():
    added, additions = [], LaterAdditions(limit_bytes=10)
    for number in range(4):
        additions.submit(lambda number=number: added.append((number, threading.get_ident())), 5)
    additions.drain()
    assert added == [(number, threading.get_ident()) for number in range(2)]
    additions.finish()
    assert [number for number, _ in added] == [0, 1, 2, 3]


def test_later_additions_that_are_abandoned_still_wait_for_their_copies():
    ended, additions = [], LaterAdditions(limit_bytes=10)

    def fail():
        ended.append("first")
        raise ValueError

    additions.submit(fail, 20)
    additions.submit(lambda: ended.append("second"), 20)
    with pytest.raises(ValueError):
        additions.drain()
    additions.abandon()
    assert ended == ["first", "second"]
