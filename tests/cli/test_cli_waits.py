"""A run says on one line what it does, if that takes long."""

import pytest


@pytest.fixture
def at_once(monkeypatch):
    """Every wait of the run counts as long."""

    class Timer:
        def __init__(self, seconds, call, args):
            assert seconds == 3.0
            self.start, self.daemon = (lambda: call(*args)), False

        def cancel(self):
            pass

    monkeypatch.setattr("headwater.trainer.waits.threading", type("Module", (), {"Timer": Timer}))


def test_a_run_says_what_it_waits_for(headwater, params, at_once):
    code, out, _ = headwater("fit", params, "--max_steps=3")
    assert code == 0
    said = [line for line in out.splitlines() if line.endswith("…")]
    assert said == [
        "reading the weights to start with …",
        "measuring the rates of this machine, which are then stored for a month …",
        "planning the steps …",
        "making the initial weights …",
        "computing the first step …",
        "evaluating …",
        "writing the checkpoint …",
        "writing the checkpoint …",
    ]
    code, out, _ = headwater("fit", params)
    assert f"reading the weights of {params.parent / 'run' / 'checkpoint_3'} …" in out.splitlines()
