"""The messages of a rank that does not find the others, while it waits and at its timeout."""

import os
import signal
import socket

import pytest

from headwater.core.errors import RankError
from headwater.fabric import rendezvous

OWN = rendezvous.Process("here", os.getpid(), 0)


@pytest.fixture
def unused_port():
    """Return a port at which no process listens."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.fixture
def rank(monkeypatch, unused_port):
    """Return a function that makes this process one of three ranks; the others do not exist."""

    def begin(number, **environment):
        told = {"RANK": number, "WORLD_SIZE": 3, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1"}
        told |= {"MASTER_PORT": unused_port, "GLOO_SOCKET_IFNAME": "lo"} | environment
        for name, value in told.items():
            monkeypatch.setenv(name, str(value))

    monkeypatch.setattr(rendezvous, "_SAY_AFTER_S", 0.1)
    monkeypatch.setattr(rendezvous, "_SHORT_S", 0.5)
    return begin


class Clock:
    """A clock that runs only while a rank sleeps, so that a slow machine changes nothing."""

    def __init__(self):
        self.now_s = 0.0

    def monotonic(self):
        return self.now_s

    def sleep(self, seconds):
        self.now_s += seconds


@pytest.mark.parametrize(
    ("number", "environment", "told"),
    [
        (0, {}, "missing ranks (of 3): 1, 2"),
        (1, {}, "rank 0 cannot be reached at 127.0.0.1:{port}: Connection refused"),
        (
            1,
            {"MASTER_ADDR": "nowhere.invalid"},
            "the host name of rank 0, 'nowhere.invalid', cannot be resolved: ",
        ),
    ],
    ids=["others", "the first", "its name"],
)
def test_a_waiting_rank_prints_the_reason_and_times_out(
    rank, unused_port, capfd, monkeypatch, number, environment, told
):
    rank(number, **environment)
    monkeypatch.setattr(rendezvous, "time", Clock())
    told = told.format(port=unused_port)
    with pytest.raises(RankError, match=r"rendezvous failed: timed out after \d s; ") as caught:
        rendezvous.meet(OWN, 0.5)
    assert told in caught.value.what and "MASTER_ADDR" in str(caught.value)
    said = capfd.readouterr().err
    assert f"rank {number} is waiting (" in said and told in said
    assert said.count("is waiting (") == 1, "once"


@pytest.fixture
def hears_interrupts():
    """Handle SIGINT, which is ignored if a shell started the tests in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Interrupting(Clock):
    """A clock during whose first sleep Ctrl-C is pressed."""

    def sleep(self, seconds):
        signal.raise_signal(signal.SIGINT)


def test_a_waiting_rank_can_be_interrupted(rank, hears_interrupts, monkeypatch):
    rank(0)
    monkeypatch.setattr(rendezvous, "time", Interrupting())
    with pytest.raises(KeyboardInterrupt):
        rendezvous.meet(OWN, 100)


def test_a_rank_without_the_address_of_rank_0_is_refused(rank, monkeypatch):
    rank(1)
    monkeypatch.delenv("MASTER_PORT")
    with pytest.raises(RankError, match="MASTER_PORT is not set") as caught:
        rendezvous.meet(OWN, 1)
    assert caught.value.remedy is not None and "torchrun" in caught.value.remedy
