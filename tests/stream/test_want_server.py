"""The thread on which the leader of a host fetches stages for other ranks."""

import threading

import pytest

from headwater.stream.want_server import WantServer


class SlowDirectory:
    """A stand-in for the slab directory, with one request. Ranks can read an error before `fail` returns."""

    def __init__(self):
        self.failed, self.was_checked = threading.Event(), threading.Event()

    def wants(self):
        return ["a stage"]

    def fail(self, text):
        self.failed.set()
        self.was_checked.wait(0.2)


def test_the_leader_raises_an_error_as_soon_as_another_rank_can_read_it():
    def serve():
        raise MemoryError("no memory")

    directory = SlowDirectory()
    server = WantServer(directory, serve)
    assert directory.failed.wait(200)
    with pytest.raises(MemoryError, match="no memory"):
        server.check()
    directory.was_checked.set()
    server.close()
