"""Lines that tell what a run does while the user waits."""

import threading
import time

import pytest

from headwater.config import load_params, shipped_params
from headwater.trainer import waits
from headwater.trainer.zoo_job import zoo_trainable


@pytest.fixture
def at_once(monkeypatch):
    """Every wait counts as long: its line is logged when it begins."""

    class Timer:
        def __init__(self, seconds, call, args):
            self.start, self.daemon = (lambda: call(*args)), False

        def cancel(self):
            pass

    monkeypatch.setattr(threading, "Timer", Timer)


def test_a_long_wait_is_one_line_and_a_short_one_is_silent(caplog, monkeypatch):
    caplog.set_level("INFO", "headwater")
    with waits.log_if_long("planning"):
        pass
    monkeypatch.setattr(waits, "SILENCE_S", 0.01)
    with waits.log_if_long("reading"):
        deadline = time.monotonic() + 60
        while not caplog.records and time.monotonic() < deadline:
            time.sleep(0.01)
    assert [record.message for record in caplog.records] == ["reading …"]


def test_a_wait_that_fails_ends_its_timer(caplog, monkeypatch):
    before = threading.active_count()
    with pytest.raises(OSError, match="full"), waits.log_if_long("writing"):
        raise OSError("full")
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join()
    assert threading.active_count() <= before and not caplog.records


def test_other_ranks_say_nothing(caplog, at_once):
    class Fabric:
        rank = 1

    caplog.set_level("INFO", "headwater")
    with waits.log_if_long("planning", Fabric):
        pass
    assert not caplog.records


def test_a_model_that_takes_long_to_build_says_so(caplog, at_once):
    caplog.set_level("INFO", "headwater")
    zoo_trainable(load_params(shipped_params()["gpt/tiny"]).init)
    assert [record.message for record in caplog.records] == ["building the model …"]
