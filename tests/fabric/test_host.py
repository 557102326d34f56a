"""Ranks of one host: waits that notice lost processes, shared memory and the lock."""

import os
import subprocess
import time

import pytest
import torch
from tests.rank_processes import run_ranks

from headwater.core.errors import RankError
from headwater.fabric import host_watch
from headwater.fabric.host_watch import HostWatch
from headwater.fabric.rendezvous import Process


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(host_watch, "_LIVENESS_S", 0.0)


def watch(timeout_s, *, pid=None, last_call=0.0):
    """Return a watch of rank 0 over itself and a rank 1, which is this process or `pid`."""
    neighbours = {0: Process("here", os.getpid(), 0), 1: Process("here", pid or os.getpid(), 0)}
    return HostWatch(0, neighbours, timeout_s, lambda: last_call)


def test_a_wait_ends_when_its_condition_is_true(impatient):
    looks = iter([False, False, True])
    watch(60).wait_until(lambda: next(looks), "a stage")
    assert [*looks] == [], "the wait asks until the condition is true"


def test_a_wait_for_a_lost_process_raises_at_once(impatient):
    gone = subprocess.Popen(["true"])
    gone.wait()
    with pytest.raises(
        RankError, match=rf"rank 1 \(process {gone.pid}\) is gone while rank 0 waits for a stage"
    ):
        watch(1000, pid=gone.pid).wait_until(lambda: False, "a stage")


def test_a_wait_ends_after_its_timeout(impatient):
    with pytest.raises(RankError, match=r"rank 0 has waited \d+ s for a stage"):
        watch(0.01).wait_until(lambda: False, "a stage")


def test_a_call_to_another_host_extends_a_wait(impatient):
    """The call itself ends after its timeout, and its error names the host."""
    looks = []

    def is_late():
        looks.append(time.monotonic())
        return looks[-1] - looks[0] > 0.1

    watch(0.05, last_call=time.monotonic() + 1000).wait_until(is_late, "a stage")
    assert looks[-1] - looks[0] > 0.1, "the wait ends with its condition"


def test_memory_is_zeroed_and_shared_in_the_order_of_calls():
    def share(fabric):
        first, second = (fabric.allocate(size) for size in (8, 3 * 4096))
        zeroed = not (first.any() or second.any())
        fabric.barrier("all ranks to read")
        second[fabric.rank] = fabric.rank + 1
        fabric.barrier("all ranks to write")
        return zeroed, first[:2].tolist(), second[:2].tolist()

    assert run_ranks(share) == [(True, [0, 0], [1, 2])] * 2


def test_a_lock_is_held_by_one_rank_and_is_reentrant():
    def add(fabric):
        total = fabric.allocate(8)[:8].view(torch.int64)
        for _ in range(50):
            with fabric.exclusive(), fabric.exclusive():
                before = total.item()
                os.sched_yield()
                total.fill_(before + 1)
        fabric.barrier("all ranks to add")
        return total.item()

    assert run_ranks(add) == [100, 100]
