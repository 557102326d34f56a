"""The end of a connection: its threads end before `close` returns, so none is left when the process exits."""

import socket
import subprocess
import sys
import threading
import time
import weakref

import pytest

from headwater.fabric.connection import Connection
from headwater.fabric.handshake import Keys

SLOW_TO_FREE = """
import socket, threading, time
import torch
from headwater.fabric.connection import Connection
from headwater.fabric.handshake import Keys


began = threading.Event()


class Pages(bytearray):
    def __del__(self):
        began.set()
        for _ in range(40):  # long enough for the main thread to end meanwhile
            time.sleep(0.01)


class Last:
    def __del__(self, sleep=time.sleep):
        sleep(0.2)


def part(size):
    return memoryview(torch.frombuffer(Pages(size), dtype=torch.uint8).numpy())


ours, theirs = (Connection(end, Keys(b"k", b"k"), 1, 100.0) for end in socket.socketpair())
received = ours.receive(part(100_000))
theirs.send(part(100_000)).result()
received.result()
ours.close()
theirs.close()
began.wait()
last = Last()  # deleted when Python has begun to end
"""
"""Ends while a thread of a connection frees the memory of a tensor."""


def connections():
    return [Connection(end, Keys(b"k", b"k"), 1, 100.0) for end in socket.socketpair()]


def threads():
    return {thread.name for thread in threading.enumerate() if " rank " in thread.name}


@pytest.mark.real_start  # a quick start ends in another way
def test_a_process_that_ends_while_a_connection_frees_memory_does_not_abort():
    """Torch frees a tensor without Python's lock; a daemon thread that takes it again aborts."""
    found = subprocess.run([sys.executable, "-c", SLOW_TO_FREE], capture_output=True, text=True)
    assert (found.returncode, found.stderr) == (0, "")


def test_close_ends_the_threads_of_a_connection():
    ours, theirs = connections()
    waiting = ours.receive(memoryview(bytearray(4)))
    large = theirs.send(memoryview(bytes(8 << 20)))  # more than the buffers of the socket hold
    assert threads() == {"from rank 1", "to rank 1"}
    waiting.result()
    ours.close()
    theirs.close()
    assert not threads()
    assert isinstance(large.exception(), ConnectionError)


class Data(bytearray):
    """Bytes to which a weak reference is possible."""


def test_the_memory_of_a_transfer_is_free_as_soon_as_the_transfer_is_done():
    ours, theirs = connections()
    data = Data(100_000)
    reference = weakref.ref(data)
    received = ours.receive(memoryview(bytearray(100_000)))
    theirs.send(memoryview(data)).result()
    received.result()
    del data
    end = time.monotonic() + 60
    while reference() is not None and time.monotonic() < end:
        time.sleep(0.001)  # the thread drops it a moment after it has set the result
    assert reference() is None
    theirs.close()
    ours.close()
