"""The thread that adds gradients to sums: order, backlog and errors."""

import threading

import pytest

from headwater.store.gradients.additions import AdditionThread


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
