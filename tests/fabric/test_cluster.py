"""Errors of ranks on several hosts: a host that does not answer, and a number of ranks that is refused."""

import multiprocessing
import os
import signal
import threading
import time

import pytest
import torch
from tests.rank_processes import run_ranks

from headwater.core.errors import ConfigError, RankError
from headwater.fabric.cluster import join_ranks
from headwater.fabric.secret import SECRET

TIMEOUT_S = 3.0


def test_a_timeout_names_the_host_that_is_missing():
    """The ranks of the first host already wait when their leader asks the silent host."""
    missed = multiprocessing.get_context("fork").Event()

    def wait(fabric):
        link, told = fabric.connect("weights"), fabric.allocate(1)
        if fabric.host == 1:
            missed.wait(100 * TIMEOUT_S)
            return None
        failures = []

        def ask():
            time.sleep(0.6 * TIMEOUT_S)
            try:
                link.gather(torch.zeros(1))
            except RankError as error:
                failures.append(error.what)
                told[0] = 1

        asking = threading.Thread(target=ask)
        if link is not None:
            asking.start()
        fabric.wait_until(lambda: bool(told[0]), "weights")
        missed.set()
        return failures

    first, second, *_ = run_ranks(wait, count=4, hosts=2, timeout_s=TIMEOUT_S)
    assert len(first) == 1 and not second
    assert "(node 0), ranks 0 to 1 cannot reach " in first[0]
    assert "(node 1), ranks 2 to 3 for weights" in first[0]


def test_gathers_wait_for_the_timeout_of_the_run():
    """A missing rank is reported after the timeout of the run, not after that of the rendezvous."""
    missed = multiprocessing.get_context("fork").Event()

    def ask(fabric):
        if fabric.rank == 1:
            missed.wait(100 * TIMEOUT_S)
            return
        for ask_all in (lambda value: fabric.gather_objects(value, torch.Tensor), fabric.gather_tensors):
            with pytest.raises(
                RankError, match=r"rank 0 cannot reach .*\(node 1\), rank 1: .*[Tt]ime(d )?out"
            ):
                ask_all(torch.zeros(1))
        missed.set()

    run_ranks(ask, hosts=2, timeout_s=TIMEOUT_S)


def test_waiting_for_a_stopped_rank_reports_that_it_is_stopped():
    """A process that SIGSTOP has stopped does not answer, although it has not ended."""

    def wait(fabric):
        stopped = fabric.gather_objects(os.getpid(), int)[1]
        if fabric.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)  # rank 0 continues it
            return None
        told = []
        for ask in (lambda: fabric.gather(1.0), lambda: fabric.gather_objects(1, int)):
            with pytest.raises(RankError) as caught:
                ask()
            told.append(caught.value.what.replace(str(stopped), "N"))
        os.kill(stopped, signal.SIGCONT)
        return told

    first, second = run_ranks(wait, timeout_s=1)[0]
    assert first == "rank 0 has waited 1 s for the values of all ranks: rank 1 (process N) is stopped"
    assert ": timed out after 1 s: rank 1 (process N) is stopped" in second


def test_a_run_that_is_refused_closes_its_connections(monkeypatch):
    start = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", SECRET: 32 * "x"}
    for name, value in start.items():
        monkeypatch.setenv(name, value)
    before = set(threading.enumerate())
    with pytest.raises(ConfigError, match="no rank is left to compute"):
        join_ranks(num_memx=1)
    for thread in set(threading.enumerate()) - before:
        thread.join(5)
        assert not thread.is_alive()
    assert not torch.distributed.is_initialized()
