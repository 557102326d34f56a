"""A run says on one line what it does, if that takes long."""

import dataclasses
import json
import subprocess
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from headwater.core.patience import Activity
from headwater.plan import calibrate, measuring
from headwater.plan.probes import Measurement
from headwater.plan.rates import Calibration
from headwater.trainer import planning


@pytest.fixture
def at_once(monkeypatch):
    """Every wait of the run counts as long."""

    class Timer:
        def __init__(self, seconds, call, args):
            assert seconds == 3.0
            self.start, self.daemon = (lambda: call(*args)), False

        def cancel(self):
            pass

    @contextmanager
    def notice_if_long(name):
        print(f"{name} …")
        yield Activity(name)

    monkeypatch.setattr("headwater.trainer.waits.threading", type("Module", (), {"Timer": Timer}))
    for module in (measuring, planning):
        monkeypatch.setattr(module, "notice_if_long", notice_if_long)


@pytest.fixture
def not_measured(monkeypatch, tmp_path):
    """No rates of this machine are known, and the measuring process answers with nominal ones."""
    found = Measurement(Calibration(*[1e9] * 8), 0.02, 1.0)
    done = subprocess.CompletedProcess([], 0, json.dumps(dataclasses.asdict(found)))
    stand_in = SimpleNamespace(run=lambda *_, **__: done, DEVNULL=subprocess.DEVNULL)
    monkeypatch.setattr(measuring, "subprocess", stand_in)
    monkeypatch.setattr(calibrate, "_IN_THIS_PROCESS", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_a_run_logs_what_it_waits_for(headwater, params, at_once, not_measured):
    code, out, _ = headwater("fit", params, "--max_steps=3")
    assert code == 0
    said = [line for line in out.splitlines() if line.endswith("…")]
    assert said == [
        "building the model …",
        "reading the weights to start with …",
        "measuring the speed of this machine, for at most 20 s …",
        "planning …",
        "making the initial weights …",
        "computing the first step …",
        "evaluating …",
        "writing the checkpoint …",
        "writing the checkpoint …",
    ]
    code, out, _ = headwater("fit", params)
    assert f"reading the weights of {params.parent / 'run' / 'checkpoint_3'} …" in out.splitlines()
