"""Selective recomputation: cheap operators run again in backward, with the bits of plain PyTorch."""

import dataclasses

import pytest
import torch
from gpt_job import gpt_job, plain_gpt
from harness import Setting, assert_equal, check, make_plan, regression, train_plain, train_streamed
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from headwater.core.errors import StreamError
from headwater.core.precision import Precision
from headwater.plan.types import Activations
from headwater.stream.selective import Selection

SETTINGS = [
    Setting(in_place=True, activations="selective"),
    Setting("memory", 2, "selective"),
    Setting("disk", 3, "selective", "disk"),
]
WIDTH, ROWS = 32, 64


class Block(nn.Module):
    """A block whose forward is given; it has two linear layers and a normalization."""

    def __init__(self, run):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("variance", torch.ones(WIDTH))
        self.run = run

    def forward(self, x):
        return self.run(self, x)


def plain(block, x):
    return x + block.second(nn.functional.gelu(block.first(block.norm(x))))


def change_after_use(block, x):
    """An operator reads `h`, whose value is kept for another node, and `h` changes afterwards."""
    h = block.first(x)
    unused = (h * h).detach()
    output = block.second(h + 1)
    h.mul_(2)
    return output + h + 0 * unused


def change_value(block, x):
    """The value of a cheap operator changes before autograd saves it."""
    h = block.first(x)
    squares = (h * h).detach()
    value = h + 1
    value.mul_(3)
    return block.second(value) + 0 * squares


def change_data(block, x):
    """As `change_value`, but no version counter sees the change."""
    h = block.first(x)
    squares = (h * h).detach()
    value = h + 1
    value.data.mul_(3)
    return block.second(value) + 0 * squares


def change_input_data(block, x):
    """The input of a cheap operator changes after it was kept, and before the operator reads it."""
    h = block.first(x)
    squares = (h * h).detach()
    h.data.mul_(3)
    return block.second(h + 1) + 0 * squares


def change_saved_data(block, x):
    """A value changes after autograd saved it, and no version counter sees the change."""
    h = block.first(x)
    squares = h * h
    value = h + 1
    output = block.second(value)
    torch._foreach_mul_([value.data], 3)
    return output + squares


def change_saved_bits(block, x):
    """Change a saved value through a view of `value.data` with another dtype."""
    h = block.first(x)
    squares = h * h
    value = h + 1
    output = block.second(value)
    value.data.view(torch.int32).bitwise_and_(-(1 << 20))
    return output + squares


def change_statistics(block, x):
    """A value needs running statistics that batch normalization changes, which its schema does not say."""
    h = block.first(x)
    value = h + block.mean
    normed = nn.functional.batch_norm(h, block.mean, block.variance, training=True, momentum=0.5)
    return h * h + block.second(value) + normed


class SumWithGradient(torch.autograd.Function):
    """A sum of squares of rows, whose kernel replaces its input by the gradient. torch sees no operator."""

    @staticmethod
    def forward(ctx, x):
        sums = x.square().sum(-1)
        x.detach().numpy()[...] *= 2
        ctx.save_for_backward(x.detach())
        return sums

    @staticmethod
    def backward(ctx, gradient):
        return ctx.saved_tensors[0] * gradient[:, None]


class Doubled(torch.autograd.Function):
    """Twice the input, by a kernel that changes a copy. torch sees only the copy."""

    @staticmethod
    def forward(ctx, x):
        copy = x.clone()
        copy.detach().numpy()[...] *= 2
        return copy

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def kernel_that_replaces_its_input(block, x):
    h = block.first(block.norm(x))
    return block.second(h * h) + 0.01 * SumWithGradient.apply(h + 1)[:, None]


def kernel_that_changes_a_copy(block, x):
    h = block.first(x)
    return h * h + block.second(Doubled.apply(h))


def gradient_of_a_gradient(block, x):
    h = block.first(x).sin()
    output = block.second(nn.functional.gelu(block.norm(h))).tanh()
    (gradient,) = torch.autograd.grad(output.sum(), h, create_graph=True)
    return output + gradient


def own_hooks(block, x):
    with saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor):
        return plain(block, x)


def own_hooks_around_a_part(block, x):
    with saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor):
        h = nn.functional.gelu(block.first(block.norm(x)))
    return x + block.second(h)


def own_checkpoint(block, x):
    return checkpoint(plain, block, x, use_reentrant=False)


def gated(block, x):
    normed = block.norm(x)
    return x + (nn.functional.silu(block.first(normed)) * block.second(normed)).tanh()


def with_dropout(block, x):
    h = nn.functional.dropout(block.first(block.norm(x)), 0.3)
    return x + nn.functional.dropout(block.second(h.relu() * 2), 0.3)


def with_views(block, x):
    normed = block.norm(x).view(2, -1, WIDTH).transpose(0, 1)
    return x + block.second(nn.functional.gelu(block.first(normed))).transpose(0, 1).reshape(x.shape)


def twice(block, x):
    return plain(block, plain(block, x))


FORWARDS = [
    *(plain, change_after_use, change_value, change_data, change_input_data, own_hooks, gated, twice),
    *(own_hooks_around_a_part, own_checkpoint, with_dropout, with_views, gradient_of_a_gradient),
    *(change_statistics, change_saved_data, change_saved_bits),
    *(kernel_that_replaces_its_input, kernel_that_changes_a_copy),
]


def stack(run, depth=3):
    return nn.Sequential(*(Block(run) for _ in range(depth)))


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("run", FORWARDS, ids=lambda run: run.__name__)
def test_forwards_that_change_save_and_hook(run, setting, tmp_path):
    check(regression(lambda: stack(run), ROWS, WIDTH, micro_batches=2), setting, tmp_path, steps=2)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_a_gpt_with_dropout_and_tied_weights(setting, tmp_path):
    streamed = train_streamed(gpt_job(micro_batches=3), setting, tmp_path, steps=2)
    assert_equal(streamed, plain_gpt(2, micro_batches=3))


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_bf16_has_the_bits_of_kept_activations(setting, tmp_path):
    def losses(activations):
        precise = dataclasses.replace(setting, precision=Precision("bf16"), activations=activations)
        return train_streamed(gpt_job(), precise, tmp_path / activations, steps=3).losses

    assert losses("selective") == losses("keep")


def test_values_that_cross_streams_are_kept(monkeypatch):
    streams = []
    monkeypatch.setattr("headwater.plan.recipes.current_stream_id", lambda device: streams[-1])
    selection = Selection(lambda tensor: None, lambda handle: handle)
    with selection.watching():
        streams.append(1)
        kept = torch.randn(8) * 2
        assert selection.function_for(kept) is None
        value, of_value = kept + 1, (kept + 1).exp()
        function = selection.function_for(value)
        assert torch.equal(function(), value)
        streams.append(2)
        assert selection.function_for(of_value) is None  # saved on another stream than it was made on
        of_both = value * 3
        assert selection.function_for(of_both) is None  # needs a value of another stream
        assert selection.function_for(kept * 3) is not None


def test_a_kept_input_that_changes_raises_as_in_plain_pytorch(tmp_path):
    def run(block, x):
        h = block.first(x)
        output = block.second(block.norm(h))
        h.mul_(2)
        return output + h

    job = regression(lambda: stack(run, 1), ROWS, WIDTH)
    with pytest.raises(StreamError, match="changed in place"):
        train_streamed(job, Setting("memory", 2, "selective"), tmp_path, steps=1)


class Changed(nn.Module):
    """A model that changes a value in place after autograd saved it, in its block or after the block."""

    def __init__(self, in_block, change):
        super().__init__()
        self.in_block, self.change = in_block, change
        self.block = Block(self._run)

    def _run(self, block, x):
        h = block.first(x)
        squares, value = h * h, h + 1
        output = block.second(value) + squares
        if self.in_block:
            self.change(value)
        return output, value

    def forward(self, x):
        output, value = self.block(x)
        if not self.in_block:
            self.change(value)
        return output


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("in_block", [True, False])
@pytest.mark.parametrize("change", [lambda v: v.mul_(2), lambda v: v[0].zero_()], ids=["value", "view"])
def test_a_value_that_changes_raises_as_in_plain_pytorch(in_block, change, setting, tmp_path):
    job = regression(lambda: Changed(in_block, change), ROWS, WIDTH)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        train_plain(job, steps=1)
    with pytest.raises(StreamError, match="changed in place"):
        train_streamed(job, setting, tmp_path, steps=1)


def test_the_trace_counts_what_custom_functions_save_as_kept(tmp_path):
    job = regression(lambda: stack(kernel_that_replaces_its_input, 1), ROWS, WIDTH)
    (cost,) = make_plan(job, job.model(), SETTINGS[0], tmp_path).trace.costs
    assert cost.cheap_bytes == 2 * ROWS * WIDTH * 4  # the values of the norm and of `h * h`, not of `h + 1`


def test_the_trace_counts_values_that_can_be_computed_again(tmp_path):
    job = regression(lambda: stack(plain), ROWS, WIDTH)
    plan = make_plan(job, job.model(), SETTINGS[0], tmp_path)
    value = ROWS * WIDTH * 4
    assert set(plan.activations) == {Activations.SELECTIVE}
    for cost in plan.trace.costs[:-1]:  # the loss saves the output of the last one
        # The normalized input and the value of GELU. Kept are GELU's input and the statistics of the norm.
        assert (cost.cheap_bytes, cost.again_bytes) == (2 * value, 2 * value)
        assert cost.saved_bytes - cost.cheap_bytes == value + 2 * ROWS * 4


def test_values_outside_of_all_stages_count_as_kept(tmp_path):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            h = self.layer(x)
            return (h.sin() * h.cos()).exp()

    job = regression(Model, ROWS, WIDTH)
    plan = make_plan(job, job.model(), SETTINGS[0], tmp_path)
    assert [cost.cheap_bytes for cost in plan.trace.costs] == [0]
    check(job, SETTINGS[0], tmp_path)
