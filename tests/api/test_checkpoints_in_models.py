"""`torch.utils.checkpoint` in user code, inside and around a model, with layers that keep statistics."""

import pytest
import torch
from any_loop import check, odd_plans, randn, train
from torch import nn
from torch.utils.checkpoint import checkpoint


def block():
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh())


def batch(number):
    return randn(4, 6, seed=number).requires_grad_()


class Blocks(nn.Module):
    """Three blocks; `run` calls a function of tensors, with or without a checkpoint."""

    def __init__(self, run, whole):
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.run = run
        self.whole = whole

    def forward(self, x):
        if self.whole:
            return self.run(self.all_blocks, x)
        for part in self.blocks:
            x = self.run(part, x)
        return x

    def all_blocks(self, x):
        for part in self.blocks:
            x = part(x)
        return x


@odd_plans
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("whole", [False, True], ids=["each block", "all blocks"])
def test_statistics_are_updated_once_for_each_run_of_a_block(plan, whole, reentrant, tmp_path):
    def run(function, x):
        return checkpoint(function, x, use_reentrant=reentrant)

    def script(place):
        model = place.compile(Blocks(run, whole))
        trained = train(
            model, lambda number: model(randn(4, 6, seed=number).requires_grad_()).square().mean()
        )
        return trained, model.blocks[0][1].num_batches_tracked

    expected = check(script, plan, tmp_path)
    assert expected[1] == 6, "the reference runs each block twice in each of three steps"


@odd_plans
def test_a_checkpoint_around_the_model_equals_plain(plan, tmp_path):
    def script(place):
        model = place.compile(nn.Sequential(*(block() for _ in range(3))))
        return train(
            model,
            lambda number: checkpoint(model, randn(4, 6, seed=number), use_reentrant=False).square().mean(),
        )

    check(script, plan, tmp_path)


@odd_plans
def test_values_kept_by_user_hooks_do_not_keep_weights_alive(plan, tmp_path):
    def script(place):
        def on_cpu(function, x):
            with torch.autograd.graph.save_on_cpu():
                return function(x)

        model = place.compile(Blocks(on_cpu, whole=True))
        return train(model, lambda number: model(randn(4, 6, seed=number)).square().mean())

    check(script, plan, tmp_path)


class CachedParametrizations(nn.Module):
    """A model that computes a parametrized weight once for two calls."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))

    def forward(self, x):
        with nn.utils.parametrize.cached():
            return self.normed(self.normed(self.first(x)).tanh())


def test_cached_parametrizations_are_not_recomputed(tmp_path):
    def script(place):
        model = place.compile(CachedParametrizations())
        return train(model, lambda number: model(randn(4, 6, seed=number)).square().mean())

    check(script, "recompute", tmp_path)


class SelfAttention(nn.Module):
    """A layer that passes one tensor to a stage as three arguments."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x):
        x = self.first(x)[None]
        return self.attention(x, x, x, need_weights=False)[0]


def test_a_recomputed_stage_may_get_one_tensor_for_several_arguments(tmp_path):
    def script(place):
        model = place.compile(SelfAttention())
        return train(model, lambda number: model(randn(4, 6, seed=number)).square().mean())

    check(script, "recompute", tmp_path)
