"""Whole trainings have the same bits with the native kernel of Adam and with torch's optimizer."""

import dataclasses

import numpy as np
import pytest
import torch
from gpt_job import gpt_job
from harness import FP32, Setting, assert_equal, train_streamed
from rank_training import masters, plan_of, train

from headwater.core.precision import Precision
from headwater.optim.spec import OptimizerSpec
from headwater.store import updater
from headwater.store.native_check import checked_adam
from rank_processes import run_ranks

BF16 = Precision("bf16")
SETTINGS = [
    Setting("memory", 2, precision=BF16),
    Setting(in_place=True, precision=FP32),
    Setting("disk", 2, "recompute", "disk", precision=BF16),
    Setting("disk", 3, precision=FP32),
]


@pytest.fixture
def count(monkeypatch):
    """Return a list to which each call of the kernel adds its number of pieces."""
    kernel, calls = checked_adam(), []
    run = type(kernel).run

    def counted(kernel, pieces, settings):
        calls.append(len(pieces))
        run(kernel, pieces, settings)

    monkeypatch.setattr(type(kernel), "run", counted)
    return calls


@pytest.mark.parametrize("optimizer", ["Adam", "AdamW"])
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda each: f"{each}-{each.precision.name}")
def test_a_run_has_the_same_bits_with_either_kernel(setting, optimizer, tmp_path, monkeypatch, count):
    spec = OptimizerSpec(optimizer, {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.8, 0.95)})
    job = dataclasses.replace(gpt_job(micro_batches=2), optimizer=spec)
    native = train_streamed(job, setting, tmp_path / "native", steps=4)
    assert count, "the kernel has run"
    count.clear()
    monkeypatch.setattr(updater, "checked_adam", lambda: None)
    assert_equal(native, train_streamed(job, setting, tmp_path / "torch", steps=4))
    assert not count, "the kernel has not run"


@pytest.mark.parametrize("precision", [FP32, BF16], ids=lambda each: each.name)
def test_two_ranks_have_the_same_bits_with_either_kernel(precision):
    def natively(fabric):
        torch.set_num_threads(1)
        return train(fabric, plan_of(precision, 2), 2, read=masters)

    def by_torch(fabric):
        updater.checked_adam = lambda: None
        return natively(fabric)

    for (told, weights), (expected, others) in zip(run_ranks(natively), run_ranks(by_torch), strict=True):
        assert told == expected
        assert all(np.array_equal(weights[name], value) for name, value in others.items())
