"""In fp32, streaming computes the bits of plain PyTorch with every plan: losses, norms and weights."""

import dataclasses
import functools
import itertools

import pytest
import torch
from gpt_job import gpt_job, plain_gpt
from harness import Setting, assert_equal, check, make_engine, regression, train_plain, train_streamed
from torch import nn

from headwater.optim.spec import OptimizerSpec, is_bias_or_norm

ALL = 99
POLICIES = ("keep", "selective", "recompute", "offload")
IN_PLACE = [Setting(in_place=True, activations=policy) for policy in POLICIES]
MEMORY = [Setting("memory", slabs, policy) for slabs, policy in itertools.product((2, 3, ALL), POLICIES)]
DISK = [
    Setting("disk", slabs, policy, gradients)
    for slabs, policy, gradients in itertools.product((2, 3, ALL), POLICIES, ("memory", "disk"))
]


MIXED = [
    Setting("disk", slabs, policy, gradients, in_memory=tuple(stages))
    for stages in ([1], [0, 2], [0, 1, 2, 3])
    for slabs, policy, gradients in (
        (2, "keep", "memory"),
        (2, "offload", "disk"),
        (ALL, "recompute", "memory"),
    )
]


@pytest.mark.parametrize("setting", IN_PLACE + MEMORY + DISK + MIXED, ids=str)
def test_every_setting_equals_plain_pytorch(setting, tmp_path):
    assert_equal(train_streamed(gpt_job(), setting, tmp_path, steps=2), plain_gpt(2))


@pytest.mark.parametrize(
    "setting",
    [
        Setting(in_place=True),
        Setting("memory", 2),
        Setting("memory", ALL, "recompute"),
        Setting("disk", 2, "recompute", "disk"),
        Setting("disk", 3),
    ],
    ids=str,
)
def test_twenty_steps_equal_plain_pytorch(setting, tmp_path):
    assert_equal(train_streamed(gpt_job(), setting, tmp_path, steps=20), plain_gpt(20))


@pytest.mark.parametrize(
    "setting",
    [
        Setting(in_place=True),
        Setting("memory", 2),
        Setting("disk", 3, "recompute", "disk"),
        Setting("disk", ALL),
        Setting("disk", 2, in_memory=(0, 2)),
    ],
    ids=str,
)
def test_three_micro_batches_equal_plain_pytorch(setting, tmp_path):
    streamed = train_streamed(gpt_job(micro_batches=3), setting, tmp_path, steps=3)
    assert_equal(streamed, plain_gpt(3, micro_batches=3))


IN_BACKWARD = [
    dataclasses.replace(setting, updates="in_backward")
    for setting in (
        *IN_PLACE,
        *MEMORY[1:8:3],
        *DISK[::5],
        *MIXED[::3],
        Setting("memory", 2, "recompute", most_stage_bytes=100_000),
        Setting("disk", 2, "recompute", "disk", most_stage_bytes=50_000),
    )
]


@functools.cache
def plain_unclipped(micro_batches):
    return train_plain(gpt_job(micro_batches=micro_batches, max_norm=None), steps=3)


@pytest.mark.same_dry_runs("micro_batches")
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("setting", IN_BACKWARD, ids=str)
def test_updates_in_backward_equal_plain_pytorch(setting, micro_batches, tmp_path):
    job = gpt_job(micro_batches=micro_batches, max_norm=None)
    assert_equal(train_streamed(job, setting, tmp_path, steps=3), plain_unclipped(micro_batches))


def mlp(depth=4, width=16):
    layers = [
        layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.LayerNorm(width), nn.GELU())
    ]
    return nn.Sequential(*layers)


@pytest.mark.parametrize(
    "clipping",
    [
        {"max_norm": None},
        {"max_norm": 1e-3},
        {"max_norm": 1e9},
        {"max_norm": None, "max_value": 1e-3},
        {"max_norm": 0.1, "max_value": 1e-3},
    ],
    ids=str,
)
@pytest.mark.parametrize("setting", [Setting("memory", 2), Setting("disk", 2, gradient_tier="disk")], ids=str)
def test_clipping(clipping, setting, tmp_path):
    check(regression(mlp, 8, 16, **clipping), setting, tmp_path)


@pytest.mark.parametrize(
    "optimizer",
    [
        OptimizerSpec("AdamW", {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True}),
        OptimizerSpec("AdamW", {"lr": 0.01, "foreach": True}),
        OptimizerSpec("Adam", {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6}),
        OptimizerSpec("SGD", {"lr": 0.1}),
        OptimizerSpec("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
        OptimizerSpec("Adagrad", {"lr": 0.1, "initial_accumulator_value": 0.1}),
        OptimizerSpec("RMSprop", {"lr": 0.01, "momentum": 0.9, "centered": True}),
        OptimizerSpec("Adadelta", {"lr": 1.0}),
        OptimizerSpec("NAdam", {"lr": 0.01}),
        OptimizerSpec("RAdam", {"lr": 0.01}),
        OptimizerSpec("Rprop", {"lr": 0.01}),
        OptimizerSpec("Adafactor", {"lr": 0.01}),
    ],
    ids=lambda spec: f"{spec.name}-{'-'.join(spec.kwargs)}",
)
@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_optimizers(optimizer, tier, tmp_path):
    check(regression(mlp, 8, 16, optimizer=optimizer), Setting(tier), tmp_path, steps=4)


@pytest.mark.parametrize(
    "optimizer",
    [
        OptimizerSpec("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        OptimizerSpec("AdamW", {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True}),
        OptimizerSpec("Adafactor", {"lr": 0.01}),
    ],
    ids=lambda spec: spec.name,
)
@pytest.mark.parametrize(
    "setting", [Setting(in_place=True), Setting("memory", 2), Setting("disk", 2)], ids=str
)
def test_optimizers_in_backward(optimizer, setting, tmp_path):
    setting = dataclasses.replace(setting, updates="in_backward")
    job = regression(mlp, 8, 16, optimizer=optimizer, max_norm=None, max_value=1e-2)
    check(job, setting, tmp_path, steps=4)


def test_weight_decay_skips_norms_and_biases(tmp_path):
    spec = OptimizerSpec("AdamW", {"lr": 0.01, "weight_decay": 0.5}, no_decay=is_bias_or_norm)
    plain = check(regression(mlp, 8, 16, optimizer=spec), Setting("disk"), tmp_path)
    everywhere = OptimizerSpec("AdamW", {"lr": 0.01, "weight_decay": 0.5})
    other = train_streamed(regression(mlp, 8, 16, optimizer=everywhere), Setting(), tmp_path, steps=3)
    assert torch.equal(other.weights["0.weight"], plain.weights["0.weight"]) is False


def half_frozen():
    model = mlp()
    for param in model[3:6].parameters():
        param.requires_grad_(False)
    model[0].bias.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    "setting",
    [Setting(in_place=True), Setting("memory", 2), Setting("disk", 2, "recompute", "disk")],
    ids=str,
)
def test_frozen_parameters(setting, tmp_path):
    job = regression(half_frozen, 8, 16)
    plain = check(job, setting, tmp_path)
    assert torch.equal(plain.weights["3.weight"], job.model().get_parameter("3.weight"))
    in_backward = dataclasses.replace(setting, updates="in_backward")
    check(dataclasses.replace(job, max_norm=None), in_backward, tmp_path)


def test_mixed_dtypes_in_one_model(tmp_path):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.narrow = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
            self.wide = nn.ModuleList(nn.Linear(8, 8).double() for _ in range(2))

        def forward(self, x):
            for layer in self.narrow:
                x = layer(x)
            x = x.double()
            for layer in self.wide:
                x = layer(x)
            return x

    check(regression(Mixed, 4, 8, max_norm=None), Setting("disk"), tmp_path)


def test_a_repeated_run_in_the_same_folder_is_bit_identical(tmp_path):
    setting = Setting("disk", 2, "recompute", "disk")
    runs = [train_streamed(gpt_job(), setting, tmp_path, steps=2) for _ in range(2)]
    assert_equal(runs[0], runs[1])
    assert list(tmp_path.iterdir()) == []


def test_evaluation_sees_committed_updates_and_changes_nothing(tmp_path):
    job = regression(mlp, 8, 16)
    expected = train_streamed(job, Setting("disk"), tmp_path, steps=2)
    reference = job.model()
    with make_engine(job, Setting("disk"), tmp_path) as engine:
        for step in range(2):
            engine.train_step(job.batches(step), job.update(step))
            loss = engine.evaluate(job.make_batch(9, 0))
            reference.load_state_dict(dict(engine.named_masters()))
            assert torch.equal(loss, job.loss(reference, job.make_batch(9, 0)))
            assert not loss.requires_grad
        assert all(torch.equal(expected.weights[name], value) for name, value in engine.named_masters())


def test_hits_and_bytes_are_counted(tmp_path):
    job = regression(mlp, 8, 16)
    with make_engine(job, Setting(slabs=ALL), tmp_path) as engine:
        everything = sum(stage.slab_bytes for stage in engine.plan.trace.stages)
        gradients = sum(4 * stage.trainable_numel for stage in engine.plan.trace.stages)
        for step in range(2):
            statistics = engine.train_step(job.batches(step), job.update(step)).statistics
            assert statistics.bytes_in == everything
            assert statistics.bytes_out == gradients
            assert statistics.misses + statistics.hits >= len(engine.plan.trace.stages)


def test_a_closed_engine_leaves_the_model_as_it_was(tmp_path):
    job = gpt_job()
    with make_engine(job, Setting("disk", 2, "recompute"), tmp_path) as engine:
        engine.train_step(job.batches(0), job.update(0))
        weights = {name: value.clone() for name, value in engine.named_masters()}
    model = engine.model
    for name, value in weights.items():
        model.get_parameter(name).data = value
    fresh = job.model()
    fresh.load_state_dict(weights, strict=False)
    batch = job.make_batch(5, 0)
    losses = []
    for each in (model, fresh):
        torch.manual_seed(3)
        losses.append(job.loss(each, batch))
        losses[-1].backward()
    assert torch.equal(*losses)
    same = zip(model.parameters(), fresh.parameters(), strict=True)
    assert all(torch.equal(own.grad, other.grad) for own, other in same)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not any("checkpoint" in module.forward.__qualname__ for module in model.modules())
