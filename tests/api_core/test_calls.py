"""Calls of a model: the guard around them, the loss of a dry run, and the precision of autocast."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn

from headwater.api.calls import autocast_precision, guard_call, is_lazy, own_randomness, stand_in_loss
from headwater.core.errors import StreamError


class Recorded:
    """A guard that records what happens, around a model whose forward is given."""

    def __init__(self, forward, error=None):
        self.events = []
        self.error = error
        self.model = nn.Identity()
        self.model.forward = self._run(forward)
        self.end = guard_call(
            self.model, self._before, self._surroundings, lambda: self.events.append("clean")
        )

    def _run(self, forward):
        def run(value):
            self.events.append("forward")
            return forward(value)

        return run

    def _before(self, args, kwargs):
        self.events.append("before")
        return self.error

    @contextmanager
    def _surroundings(self):
        self.events.append("enter")
        yield
        self.events.append("leave")


def raising(error):
    def forward(value):
        raise error

    return forward


def test_a_guard_surrounds_each_call_until_it_ends():
    guard = Recorded(lambda value: value + 1)
    assert guard.model(1) == 2
    assert guard.events == ["before", "enter", "forward", "leave"]
    guard.end()
    guard.model(1)
    assert guard.events[4:] == ["forward"]


def test_the_error_of_the_guard_is_raised_after_the_call():
    guard = Recorded(lambda value: value, error=ValueError("dry run"))
    with pytest.raises(ValueError, match="dry run"):
        guard.model(1)
    assert guard.events == ["before", "enter", "forward", "leave"]


def test_the_error_of_the_call_comes_first():
    guard = Recorded(raising(KeyError("call")), error=ValueError("dry run"))
    with pytest.raises(KeyError, match="call"):
        guard.model(1)


@pytest.mark.parametrize(("error", "cleans"), [(KeyboardInterrupt(), True), (ValueError(), False)])
def test_an_interrupted_call_is_cleaned_up(error, cleans):
    guard = Recorded(raising(error))
    with pytest.raises(type(error)):
        guard.model(1)
    assert ("clean" in guard.events) == cleans


def test_a_derivative_in_the_forward_is_refused():
    message = "torch.func transforms don't yet support saved tensor hooks."
    with pytest.raises(StreamError, match="cannot be used in the forward of a streamed model"):
        Recorded(raising(RuntimeError(message))).model(1)


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (lambda x: x.sum(), lambda x: x.sum()),
        (lambda x: x, lambda x: x.log_softmax(-1).sum()),
        (lambda x: {"loss": x.sum(), "rest": (x.detach(), None)}, lambda x: x.sum()),
        (lambda x: {"loss": x.prod(), "logits": x}, lambda x: x.prod() + x.sum()),
        (lambda x: x.to_sparse(), lambda x: x.flatten().log_softmax(-1).sum()),
    ],
    ids=["scalar", "logits", "nested", "loss and logits", "sparse"],
)
def test_the_loss_of_a_dry_run_depends_on_every_output_with_a_gradient(output, expected):
    x = torch.tensor([[1.0, 2.0], [3.0, 5.0]], requires_grad=True)
    assert torch.equal(stand_in_loss(output, ((x,), {})), expected(x))


def test_autocast_decides_the_precision():
    assert autocast_precision("cpu").name == "fp32"
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16")):
        with torch.autocast("cpu", dtype=dtype):
            assert autocast_precision("cpu").name == name


def test_lazy_modules_are_lazy_until_their_first_call():
    model = nn.Sequential(nn.LazyLinear(2))
    assert is_lazy(model)
    model(torch.ones(1, 3))
    assert not is_lazy(model)


def test_ranks_draw_different_numbers_inside_and_the_same_after():
    drawn, after = [], []
    for rank in range(2):
        torch.manual_seed(3)
        with own_randomness(rank):
            drawn.append(torch.rand(4))
        after.append(torch.rand(4))
    assert not torch.equal(*drawn)
    assert torch.equal(*after)
