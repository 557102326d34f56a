"""Training in bf16 and fp16: masters keep 32 bits, and the loss follows that of fp32."""

import dataclasses

import pytest
import torch
from gpt_job import gpt_job, gpt_loss, make_gpt
from harness import (
    FP32,
    History,
    Job,
    Setting,
    assert_equal,
    collect,
    make_engine,
    regression,
    train_plain,
    train_streamed,
)
from torch import nn

from headwater.core.precision import Precision
from headwater.models.layers.feed_forward import FeedForward
from headwater.optim.spec import OptimizerSpec
from headwater.store.update import Update

BF16 = Precision("bf16")
STEPS = 30
RATE = OptimizerSpec("AdamW", {"lr": 2e-3, "weight_decay": 0.1})


def learnable_job(**options) -> Job:
    """Return a job that trains a GPT on repeated text, so that the loss falls."""

    def batch(step: int, index: int) -> torch.Tensor:
        starts = torch.randint(0, 96, (4, 1), generator=torch.Generator().manual_seed(100 * step + index))
        return (starts + 7 * torch.arange(64)) % 96

    return Job(make_gpt, batch, gpt_loss, optimizer=RATE, **options)


def test_bf16_follows_fp32(tmp_path):
    """One plan is enough: the test below shows that every plan computes the same bits."""
    setting = Setting("disk", 3, "recompute", "disk", precision=BF16)
    run = train_streamed(learnable_job(), setting, tmp_path, steps=STEPS)
    fp32 = train_plain(learnable_job(), steps=STEPS)
    assert run.losses[-1] < 0.85 * run.losses[0]
    torch.testing.assert_close(torch.tensor(run.losses), torch.tensor(fp32.losses), rtol=0.03, atol=0.0)
    assert {value.dtype for value in run.weights.values()} == {torch.float32}
    bits = torch.cat([value.flatten().view(torch.int32) for value in run.weights.values()])
    assert (bits & 0xFFFF != 0).float().mean() > 0.9, "the lower half of most masters is in use"


def test_every_plan_computes_the_same_bf16_bits(tmp_path):
    settings = [
        Setting("memory", 2, precision=BF16),
        Setting("disk", 2, "recompute", "disk", precision=BF16),
        Setting("memory", 99, "offload", precision=BF16),
        Setting(in_place=True, precision=BF16),
    ]
    runs = [train_streamed(gpt_job(), setting, tmp_path, steps=3) for setting in settings]
    for run in runs[1:]:
        assert run.losses == runs[0].losses
        assert run.norms == runs[0].norms
        assert all(torch.equal(run.weights[name], value) for name, value in runs[0].weights.items())


def test_updates_in_backward_compute_the_same_bf16_bits(tmp_path):
    settings = [
        Setting("memory", 2, precision=BF16),
        Setting("disk", 2, "recompute", "disk", precision=BF16),
        Setting(in_place=True, precision=BF16),
        Setting(in_place=True, activations="recompute", precision=BF16),
    ]
    for micro_batches in (1, 2):
        job = gpt_job(max_norm=None, micro_batches=micro_batches)
        expected = train_streamed(job, settings[0], tmp_path, steps=3)
        for setting in settings:
            in_backward = dataclasses.replace(setting, updates="in_backward")
            assert_equal(train_streamed(job, in_backward, tmp_path, steps=3), expected)


def test_layers_that_compute_their_input_again_have_the_same_bf16_bits_in_every_plan(tmp_path):
    """Backward must use the bf16 weights. A parameter at rest holds its fp32 master."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        layers = [FeedForward(8, 16, kind, bias=True, dropout=0.0) for kind in ("gelu", "swiglu")]
        for param in nn.ModuleList(layers).parameters():
            nn.init.normal_(param, std=0.3)
        return nn.Sequential(*layers)

    settings = [
        Setting(in_place=True, precision=BF16),
        Setting("disk", 2, precision=BF16),
        Setting("memory", 2, "recompute", precision=BF16),
        Setting("memory", 2, "offload", precision=BF16),
    ]
    runs = [train_streamed(regression(make, 4, 8), setting, tmp_path, steps=3) for setting in settings]
    for run in runs[1:]:
        assert run.losses == runs[0].losses
        assert all(torch.equal(run.weights[name], value) for name, value in runs[0].weights.items())


class Product(torch.autograd.Function):
    """A product whose backward multiplies in Python by the weight that its forward has saved."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.bfloat16)
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight.t(), x.flatten(0, -2).t() @ gradient.flatten(0, -2)


class Multiply(nn.Module):
    def __init__(self, *, frozen: bool) -> None:
        super().__init__()
        self.linear, self.weight = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 8) / 3, not frozen)

    def forward(self, x):
        return Product.apply(torch.tanh(self.linear(x)), self.weight).to(x.dtype)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_backward_of_the_user_gets_the_bf16_weight_that_was_saved_in_every_plan(frozen, tmp_path):
    """Between forwards the parameter object reads its fp32 master; with it, backward would fail."""
    job = regression(
        lambda: nn.Sequential(*(Multiply(frozen=frozen) for _ in range(3))), 4, 8, micro_batches=2
    )
    settings = [
        Setting("memory", 2, precision=BF16),
        Setting(in_place=True, precision=BF16),
        Setting(in_place=True, activations="recompute", precision=BF16),
        Setting("memory", 99, precision=BF16),
        Setting("disk", 2, precision=BF16),
        Setting("disk", 2, "recompute", precision=BF16),
    ]
    runs = [train_streamed(job, setting, tmp_path, steps=3) for setting in settings]
    for run in runs[1:]:
        assert run.losses == runs[0].losses
        assert all(torch.equal(run.weights[name], value) for name, value in runs[0].weights.items())


def test_updates_below_the_resolution_of_bf16_accumulate(tmp_path):
    """A weight of 1 decreases by 1e-4 a step: without an fp32 master it would stay 1 in bf16."""
    optimizer = OptimizerSpec("SGD", {"lr": 1.0})
    job = regression(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), 2, 4, optimizer=optimizer)
    with make_engine(job, Setting("disk", precision=BF16), tmp_path) as engine:
        engine.store.parameters.write(0, lambda piece: piece.master.fill_(1.0))
        for step in range(10):
            engine.store.begin_step()
            engine.store.add_gradient((0, 0), torch.full((4, 4), 1e-4), last=True)
            engine.store.end_micro_batch()
            engine.store.commit(Update(step, {"lr": 1.0}))
        weight = dict(engine.named_masters())["0.weight"]
    torch.testing.assert_close(weight, torch.full((4, 4), 0.999), rtol=0, atol=1e-6)


def test_norms_and_embeddings_of_a_bf16_run(tmp_path):
    with make_engine(gpt_job(), Setting("memory", precision=BF16), tmp_path) as engine:
        shown = {param.dtype for param in engine.model.parameters()}
        wire = {spec.name: spec.wire_dtype for stage in engine.store.stages for spec in stage.params}
    assert shown == {torch.float32}  # the masters
    assert {dtype for name, dtype in wire.items() if "ln_" in name} == {torch.float32}
    assert {dtype for name, dtype in wire.items() if "ln_" not in name} == {torch.bfloat16}


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_fp16_with_a_loss_scale(micro_batches, tmp_path):
    # AdamW would hide a wrong factor of all gradients.
    job = dataclasses.replace(
        learnable_job(micro_batches=micro_batches), optimizer=OptimizerSpec("SGD", {"lr": 1.0})
    )
    plain = train_plain(job, steps=5, precision=FP32)
    history = History()
    with make_engine(job, Setting("disk", 2, precision=Precision("fp16", 2.0**12)), tmp_path) as engine:
        for step in range(5):
            report = engine.train_step(job.batches(step), job.update(step, loss_scale=2.0**12))
            history.losses.append(report.loss)
            history.norms.append(report.gradient_norm)
        collect(engine, history)
    torch.testing.assert_close(torch.tensor(history.losses), torch.tensor(plain.losses), rtol=0.01, atol=0)
    torch.testing.assert_close(torch.tensor(history.norms), torch.tensor(plain.norms), rtol=0.05, atol=0)


def test_fp16_overflow_is_skipped_and_leaves_no_trace(tmp_path):
    job = learnable_job()
    with make_engine(job, Setting("memory", 2, precision=Precision("fp16", "dynamic")), tmp_path) as engine:
        before = {name: value.clone() for name, value in engine.named_masters()}
        report = engine.train_step(job.batches(0), job.update(0, loss_scale=2.0**40, skip_non_finite=True))
        assert not report.applied
        assert all(torch.equal(before[name], value) for name, value in engine.named_masters())
        assert engine.train_step(
            job.batches(0), job.update(0, loss_scale=2.0**8, skip_non_finite=True)
        ).applied
