"""Errors of ranks on several hosts: a host that does not answer, and a number of ranks that is refused."""

import multiprocessing
import os
import re
import signal
import socket
import struct
import threading
import time

import pytest
import torch
from tests.rank_processes import run_ranks

from headwater.core.errors import ConfigError, RankError, StreamError
from headwater.fabric.cluster import join_ranks
from headwater.fabric.parent import is_stopped
from headwater.fabric.secret import SECRET


def test_a_timeout_names_the_host_that_is_missing():
    """The ranks of the first host already wait when their leader asks the silent host."""
    missed = multiprocessing.get_context("fork").Event()
    timeout_s = 8.0  # a rank that stalls for less than this changes nothing

    def wait(fabric):
        link, told = fabric.connect("weights"), fabric.allocate(1)
        if fabric.host == 1:
            missed.wait(100)
            return None
        failures = []

        def ask():
            time.sleep(0.2 * timeout_s)
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

    first, second, *_ = run_ranks(wait, count=4, hosts=2, timeout_s=timeout_s)
    assert len(first) == 1 and not second
    assert "(node 0), ranks 0 to 1 cannot reach " in first[0]
    assert "(node 1), ranks 2 to 3 for weights" in first[0]


def test_gathers_wait_for_the_timeout_of_the_run():
    """A missing rank is reported after the timeout of the run, not after that of the rendezvous."""
    missed = multiprocessing.get_context("fork").Event()

    def ask(fabric):
        if fabric.rank == 1:
            missed.wait(100)
            return
        for ask_all in (lambda value: fabric.gather_objects(value, torch.Tensor), fabric.gather_tensors):
            with pytest.raises(
                RankError, match=r"rank 0 cannot reach .*\(node 1\), rank 1: .*[Tt]ime(d )?out"
            ):
                ask_all(torch.zeros(1))
        missed.set()

    run_ranks(ask, hosts=2, timeout_s=3.0)


def wait_at_most_a_second(fabric):
    """Shorten the timeout of a rank that is connected with the others."""
    fabric._host.watch._timeout_s = 1
    for connection in fabric._messages._every._connections.values():
        connection._timeout_s = 1
        connection._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 1, 0))


def test_waiting_for_a_stopped_rank_reports_that_it_is_stopped():
    """A process that SIGSTOP has stopped does not answer, although it has not ended."""

    def wait(fabric):
        stopped = fabric.gather_objects(os.getpid(), int)[1]
        if fabric.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)  # rank 0 continues it
            return None
        while not is_stopped(stopped):
            time.sleep(0.01)
        wait_at_most_a_second(fabric)
        told = []
        for ask in (lambda: fabric.gather(1.0), lambda: fabric.gather_objects(1, int)):
            with pytest.raises(RankError) as caught:
                ask()
            told.append(caught.value.what.replace(str(stopped), "N"))
        os.kill(stopped, signal.SIGCONT)
        return told

    told = run_ranks(wait)[0]
    for what, text in zip(("number", "value"), told, strict=True):
        said = rf"rank 0 has waited \d+ s for a {what} of each rank: rank 1 \(process N\) is stopped"
        assert re.fullmatch(said, text)


@pytest.mark.parametrize("alone", ["gather", "gather_objects", "agree", "barrier"])
def test_ranks_that_run_different_operations_raise_an_error_at_once(alone):
    """Each would wait for the other until the timeout, or get its value for another operation."""

    def ask(fabric):
        what = "the state of an optimizer"
        calls = {
            "gather": lambda: fabric.gather(1.0, what),
            "gather_objects": lambda: fabric.gather_objects(1, int, what),
            "agree": lambda: fabric.agree(lambda: 1, int, what),
            "barrier": lambda: fabric.barrier(what),
        }
        with pytest.raises(StreamError) as caught:
            calls[alone]() if fabric.rank == 1 else fabric.gather(2.0, "the model to be called")
        return caught.value.what

    for text in run_ranks(ask):
        assert text == (
            "all ranks must run the same operations, but rank 0 waits for the model to be called, "
            "and rank 1 waits for the state of an optimizer"
        )


def test_a_run_that_is_refused_closes_its_connections(monkeypatch):
    start = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", SECRET: 32 * "x"}
    for name, value in start.items():
        monkeypatch.setenv(name, value)
    before = set(threading.enumerate())
    with pytest.raises(ConfigError, match="no rank is left to compute"):
        join_ranks(num_memx=1)
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
        assert not thread.is_alive()
    assert not torch.distributed.is_initialized()
