"""Scripted parts, threads and generators in a forward."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from any_loop import Place, adamw, check, odd_plans, randn, train
from torch import nn

from headwater.core.errors import StreamError

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.*is deprecated:DeprecationWarning")


def block():
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh())


@odd_plans
def test_traced_submodules_equal_plain(plan, tmp_path):
    def script(place):
        traced = torch.jit.trace(block(), randn(2, 6, seed=0))
        model = place.compile(nn.Sequential(block(), traced, block()))
        return train(model, lambda number: model(randn(5, 6, seed=number)).square().mean())

    check(script, plan, tmp_path)


@odd_plans
def test_scripted_submodules_equal_plain(plan, tmp_path):
    """torch's interpreter rounds differently after its first calls, and the dry run may be one of them."""
    losses = []
    for where in (None, plan):
        torch.manual_seed(0)
        place = Place(where, tmp_path)
        model = place.compile(nn.Sequential(block(), torch.jit.script(block()), block()))

        def call(number, model=model):
            return model(randn(5, 6, seed=number)).square().mean()

        losses.append(train(model, call)[0])
        place.release()
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))


class InThreads(Layers):
    def forward(self, x):
        with ThreadPoolExecutor(2) as pool:
            return sum(pool.map(lambda layer: layer(x), self.layers))


class Generating(Layers):
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            yield x


@pytest.mark.parametrize("plan", ["memory", "slabs"])
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (InThreads, "reads no weights in the thread that calls it"),
        (Generating, "got a generator, which runs after its weights are gone"),
    ],
)
def test_forwards_in_threads_and_generators_are_refused_with_a_reason(plan, kind, reason, tmp_path):
    place = Place(plan, tmp_path)
    model = place.compile(kind())
    with pytest.raises(StreamError, match=reason):
        model(randn(2, 6, seed=0))
    place.release()


class Borrower(nn.Module):
    """A model whose forward calls a module that another model owns."""

    def __init__(self, lender):
        super().__init__()
        self.lenders = [lender]
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        return self.head(self.lenders[0](x))


@pytest.mark.parametrize("steps", [1, 2, 3])
@odd_plans
def test_a_compiled_model_calls_another_one_that_has_trained(plan, steps, tmp_path):
    """The dry run of the outer model meets the inner one, which looks for changes of its weights."""

    def script(place):
        inner = place.compile(nn.Sequential(block(), block()))
        for number in range(steps):
            train(inner, lambda _, number=number: inner(randn(5, 6, seed=number)).square().mean())
        outer = place.compile(Borrower(inner))
        return train(outer, lambda number: outer(randn(5, 6, seed=number)).square().mean())

    check(script, plan, tmp_path)


@odd_plans
def test_a_module_of_another_compiled_model_is_called(plan, tmp_path):
    def script(place):
        shared = block()
        owner = place.compile(nn.Sequential(shared, block()))
        borrower = place.compile(Borrower(shared))
        trained = train(owner, lambda number: owner(randn(5, 6, seed=number)).square().mean())
        return trained, train(borrower, lambda number: borrower(randn(5, 6, seed=number)).square().mean())

    check(script, plan, tmp_path)


class FusedHead(torch.autograd.Function):
    """A head that reads its weight in the backward too, as kernels that never keep all logits do."""

    @staticmethod
    def forward(ctx, hidden, weight):
        ctx.save_for_backward(hidden, weight)
        return hidden @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        hidden, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ hidden


class WithFusedHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)))
        self.head = nn.Linear(6, 3, bias=False)

    def forward(self, x, fused=False):
        hidden = self.body(x)
        return FusedHead.apply(hidden, self.head.weight) if fused else self.head(hidden)


@odd_plans
def test_a_later_forward_passes_a_weight_to_an_autograd_function(plan, tmp_path):
    """The first forward uses the weight in its module alone, so the weight is at rest when it is saved."""

    def script(place):
        model = place.compile(WithFusedHead())
        optimizer = adamw(model.parameters())
        with torch.no_grad():
            model(randn(5, 6, seed=9))
        seen = []
        for number in range(3):
            optimizer.zero_grad()
            loss = model(randn(5, 6, seed=number), fused=True).square().mean()
            loss.backward()
            seen += [loss, [param.grad.clone() for param in model.parameters()]]
            optimizer.step()
        return seen, model

    check(script, plan, tmp_path)
