"""`parameter.data = ...` equals plain PyTorch, between forwards and inside them."""

import copy

import pytest
import torch
from any_loop import PLANS, Place, adamw, assert_equal, check, every_plan, some_plan
from test_changed_models import inputs, stack, train
from torch import nn

import headwater as cstorch
from headwater.core.errors import StreamError


@some_plan
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtype_converted_after_an_evaluation(plan, dtype, tmp_path):
    def script(place):
        model = place.compile(stack())
        with torch.no_grad():
            before = model(inputs(0))
        model.to(dtype)
        optimizer = adamw(model.parameters())
        losses = []
        for number in range(3):
            optimizer.zero_grad()
            loss = model(inputs(number).to(dtype)).float().square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return before, losses, [p.dtype for p in model.parameters()], model, optimizer

    check(script, plan, tmp_path)


@some_plan
@pytest.mark.filterwarnings("ignore::headwater.api.loop_steps.LoopStepWarning")
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.RMSprop])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_state_keeps_its_dtype_when_the_model_is_converted(kind, dtype, plan, tmp_path):
    def script(place):
        model = place.compile(stack())
        optimizer = kind(model.parameters(), lr=0.01, momentum=0.9)
        losses = []
        for number in range(5):
            loss = model(inputs(number).to(next(model.parameters()).dtype)).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if number == 1:
                model.to(dtype)
        return losses, model, optimizer

    check(script, plan, tmp_path)


@some_plan
def test_data_of_the_same_and_of_another_shape(plan, tmp_path):
    def script(place):
        model = place.compile(stack())
        optimizer = adamw(model.parameters())
        losses = train(model, optimizer, 2)
        model[0][0].weight.data = torch.full((6, 6), 0.1)
        losses += train(model, optimizer, 2)
        model[3][0].weight.data = model[3][0].weight.data[:4] * 2
        model[3][0].bias.data = model[3][0].bias.data[:4].clone()
        between = model[3][0].weight.detach().clone(), model[3][0].weight.shape
        second = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        return losses, between, train(model, second, 2), model

    check(script, plan, tmp_path)


@every_plan
def test_a_part_is_called_after_a_weight_got_other_strides(plan, tmp_path):
    """Only a call of the whole model plans again, so the part runs with the engine of the former strides."""

    def script(place):
        blocks = stack()
        model = place.compile(nn.Sequential(blocks))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = train(model, optimizer, 2)
        with torch.no_grad():
            model(inputs(5))  # now the bound memory of each stage is known
        blocks[0][0].weight.data = blocks[0][0].weight.data.t().contiguous().t()
        losses += train(blocks, optimizer, 2)
        with torch.no_grad():
            outputs = blocks(inputs(6))
        return losses, outputs, train(model, optimizer, 2), model

    check(script, plan, tmp_path)


@some_plan
def test_a_model_that_is_released_after_another_shape_has_the_state_of_its_optimizer(plan, tmp_path):
    def script(place):
        model = place.compile(stack())
        optimizer = adamw(model.parameters())
        losses = train(model, optimizer, 2)
        model[3][0].weight.data = model[3][0].weight.data[:4].clone()
        place.release()
        return losses, model, optimizer

    check(script, plan, tmp_path)


@some_plan
def test_a_parameter_of_another_shape_keeps_its_moments(plan, tmp_path):
    """The optimizer of plain PyTorch does not notice the new shape either."""

    def script(place):
        torch.manual_seed(0)
        model = place.compile(stack())
        optimizer = adamw(model.parameters())
        train(model, optimizer, 2)
        weight = model[1][0].weight
        weight.data = weight.data[:3]
        return dict(optimizer.state[weight]), weight.shape

    given = script(Place(plan, tmp_path))
    expected = script(Place(None, tmp_path))
    assert given[1] == expected[1]
    assert_equal(given[0], expected[0])


def tied_before(model):
    model[1][0].weight.data = model[0][0].weight.data


def tied_transposed(model):
    model[1][0].weight.data = model[0][0].weight.data.t()


def tied_by_detach(model):
    model[1][0].weight.data = model[0][0].weight.detach()


def views_of_one_tensor(model):
    base = torch.randn(8, 6)
    model[0][0].weight.data = base[:6]
    model[1][0].weight.data = base[2:]


TIES = [tied_before, tied_transposed, tied_by_detach, views_of_one_tensor]


@pytest.mark.parametrize("tie", TIES)
@pytest.mark.parametrize("when", ["before compile", "before the first forward"])
def test_parameters_with_shared_memory_are_refused(tie, when, tmp_path):
    model = stack()
    place = Place("memory", tmp_path)
    if when == "before compile":
        tie(model)
    with pytest.raises(StreamError, match=r"share memory.*\n?.*one Parameter|one Parameter") as caught:
        place.compile(model)
        tie(model)
        model(inputs(0))
    assert "1.0.weight" in str(caught.value) and "0.0.weight" in str(caught.value)
    assert "model[1][0].weight = model[0][0].weight" in str(caught.value)
    if cstorch.api.compile.is_compiled(model):
        place.release()


def test_the_remedy_for_shared_memory_of_other_shapes_does_not_tie_the_parameters(tmp_path):
    model = stack()
    model.parts = nn.ParameterList([nn.Parameter(model[0][0].weight.detach()[None])])
    with pytest.raises(StreamError, match="share memory") as caught:
        cstorch.compile(model, cstorch.backend("CSX", tier="memory"))
    assert caught.value.remedy == "separate them, model.parts[0].data = model.parts[0].data.clone()"


def test_parameters_made_in_inference_mode_are_refused(tmp_path):
    with torch.inference_mode():
        model = nn.Linear(4, 4)
    with pytest.raises(StreamError, match="parameter weight was made inside"):
        cstorch.compile(model, cstorch.backend("CSX", tier="memory"))
    model = cstorch.compile(
        nn.Sequential(nn.LazyLinear(4)), cstorch.backend("CSX", tier="disk", disk=tmp_path)
    )
    with torch.inference_mode():
        model(torch.ones(2, 4))
    with pytest.raises(StreamError, match="call of a lazy layer"):
        model(torch.ones(2, 4))


@pytest.mark.parametrize("tie", TIES[:3])
def test_tying_weights_by_data_after_a_forward_is_refused(tie, tmp_path):
    model = Place("memory", tmp_path).compile(stack())
    train(model, adamw(model.parameters()), 1)
    with pytest.raises(StreamError, match=r"0\.0\.weight"):
        tie(model)
    cstorch.release(model)


@some_plan
def test_parameters_that_are_disjoint_views_of_one_tensor(plan, tmp_path):
    def script(place):
        model = stack()
        base = torch.randn(12, 6)
        model[0][0].weight, model[1][0].weight = nn.Parameter(base[:6]), nn.Parameter(base[6:])
        del base
        place.compile(model)
        return train(model, adamw(model.parameters())), model

    check(script, plan, tmp_path)


class Renormalizing(nn.Linear):
    def forward(self, x):
        self.weight.data = torch.renorm(self.weight.data, 2, 0, 0.3)
        return super().forward(x)


class RenormalizingFactor(nn.Linear):
    """A layer whose product saves the parameter itself; the products of `Renormalizing` save a view of it."""

    def forward(self, x):
        self.weight.data = torch.renorm(self.weight.data, 2, 0, 0.3)
        return x @ self.weight


class Clamping(nn.Linear):
    def forward(self, x):
        self.weight.data.clamp_(-0.1, 0.1)
        with torch.no_grad():
            self.bias.mul_(0.9)
        return super().forward(x)


class WithMomentum(nn.Module):
    """Two encoders; the second is a moving average of the first."""

    def __init__(self):
        super().__init__()
        self.query, self.key = stack(2), stack(2).requires_grad_(False)
        self.head = nn.Linear(6, 6)

    def forward(self, x):
        if self.training:
            for own, other in zip(self.key.parameters(), self.query.parameters(), strict=True):
                own.data = own.data * 0.9 + other.data * 0.1
        return self.head(self.query(x)) - self.key(x)


class MaskedForAMoment(nn.Linear):
    def forward(self, x):
        before, y = self.weight.data, super().forward(x)
        self.weight.data = before * (before > 0)
        y = y + super().forward(x)
        self.weight.data = before
        return y


class SetByFirstBatch(nn.Linear):
    """A layer whose first forward sets the bias, as the normalization of flows does."""

    def __init__(self):
        super().__init__(6, 6)
        self.register_buffer("is_set", torch.zeros(()))

    def forward(self, x):
        if self.training and not self.is_set > 0:
            self.bias.data = -super().forward(x).mean(0)
            self.is_set = torch.ones(())
        return super().forward(x)


MODELS = {
    "first batch": lambda: nn.Sequential(*(SetByFirstBatch() for _ in range(4))),
    "renormalizing": lambda: nn.Sequential(*(Renormalizing(6, 6) for _ in range(4))),
    "renormalizing factor": lambda: nn.Sequential(*(RenormalizingFactor(6, 6, False) for _ in range(4))),
    "all in slabs": lambda: nn.Sequential(*(RenormalizingFactor(6, 6, False) for _ in range(4))),
    "clamping": lambda: nn.Sequential(*(Clamping(6, 6) for _ in range(4))),
    "momentum": lambda: nn.Sequential(WithMomentum(), *stack(2)),
    "twice": lambda: nn.Sequential(*[Renormalizing(6, 6)] * 2, *stack(2)),
    "for a moment": lambda: nn.Sequential(*(MaskedForAMoment(6, 6) for _ in range(4))),
}
SLABS = {"momentum": {"num_slabs": 5}, "all in slabs": {"num_slabs": 4}}


@pytest.mark.parametrize("plan", ["memory", "slabs", "disk", "recompute"])
@pytest.mark.parametrize("kind", MODELS)
def test_weights_that_a_forward_changes(plan, kind, tmp_path, monkeypatch):
    monkeypatch.setitem(PLANS, plan, PLANS[plan] | (SLABS.get(kind, {}) if plan != "memory" else {}))

    def script(place):
        model = place.compile(MODELS[kind]())
        optimizer = adamw(model.parameters())
        model.eval()
        with torch.no_grad():
            evaluated = model(inputs(0))
        model.train()
        losses = train(model, optimizer, 2)
        optimizer.zero_grad()
        model(inputs(5)).square().mean().backward()
        model(inputs(6)).square().mean().backward()
        optimizer.step()
        return evaluated, losses, train(model, optimizer, 1), model, optimizer

    check(script, plan, tmp_path)


class AssignedAfterUse(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        self.weight.data = self.weight.data * 0.9
        return y


def test_weights_that_are_assigned_after_their_use_are_refused(tmp_path):
    model = Place("memory", tmp_path).compile(nn.Sequential(nn.Linear(6, 6), AssignedAfterUse(6, 6)))
    with pytest.raises(StreamError, match=r"1\.weight and assigns 1\.weight\.data afterwards"):
        model(inputs(0))
    cstorch.release(model)


@pytest.mark.parametrize("plan", ["memory", "slabs"])
def test_weights_that_only_a_later_forward_assigns_are_refused(plan, tmp_path):
    model = Place(plan, tmp_path).compile(stack())
    train(model, adamw(model.parameters()), 1)
    layer = model[1][0]
    layer.register_forward_pre_hook(lambda module, args: setattr(layer.weight, "data", layer.weight.data * 2))
    with pytest.raises(StreamError, match="the forward changes a weight"):
        model(inputs(1))
    cstorch.release(model)


class ScaledLater(nn.Linear):
    """A layer that scales its weight in each forward from the third on."""

    calls = 0

    def __init__(self, change):
        super().__init__(6, 6)
        self.change = change

    def forward(self, x):
        if self.calls >= 2:
            self.change(self.weight)
        self.calls += 1
        return super().forward(x)


@torch.no_grad()
def scaled(weight):
    weight.mul_(0.5)


def by_numpy(weight):
    values = weight.detach().numpy()
    values *= 0.5


COUNTED, UNCOUNTED = "did not change in the dry run", r"changes \d\.weight by \.data or numpy"
LATER_CHANGES = {
    "detach": (lambda weight: weight.detach().mul_(0.5), COUNTED),
    "no_grad": (scaled, COUNTED),
    "data": (lambda weight: weight.data.mul_(0.5), UNCOUNTED),
    "numpy": (by_numpy, UNCOUNTED),
}
"""Changes in place with the error that each causes. torch does not count some of them."""


@pytest.mark.parametrize("plan", ["memory", "slabs", "disk", "recompute", "recompute in place"])
@pytest.mark.parametrize(("change", "reason"), LATER_CHANGES.values(), ids=LATER_CHANGES)
def test_weights_that_only_later_forwards_change_in_place(plan, change, reason, tmp_path, monkeypatch):
    """The change is kept where the weights are in the memory of the store, and is an error elsewhere."""
    monkeypatch.setitem(PLANS, "recompute in place", {"tier": "memory", "activations": "recompute"})

    def script(place):
        model = place.compile(nn.Sequential(*(ScaledLater(change) for _ in range(4))))
        optimizer = adamw(model.parameters())
        return train(model, optimizer, 10), model, optimizer

    if plan == "memory":
        check(script, plan, tmp_path)
    else:
        with pytest.raises(StreamError, match=reason):
            check(script, plan, tmp_path)


class ScaledInTurn(ScaledLater):
    """A layer that scales its weight by `.data` in every second forward from the third on."""

    def __init__(self):
        super().__init__(lambda weight: None if self.calls % 2 else weight.data.mul_(0.5))


def test_a_change_in_every_second_forward_of_one_layer_is_found(tmp_path):
    model = Place("slabs", tmp_path).compile(nn.Sequential(stack(), ScaledInTurn(), nn.Linear(6, 6)))
    with pytest.raises(StreamError, match=r"changes 1\.weight by \.data"):
        train(model, adamw(model.parameters()), 60)
    cstorch.release(model)


class ReadsData(nn.Linear):
    def forward(self, x):
        return super().forward(x) + self.weight.data.sum() + copy.deepcopy(self.weight).data.sum()


@every_plan
def test_forwards_that_read_data_are_as_in_plain_pytorch(plan, tmp_path):
    def script(place):
        model = place.compile(nn.Sequential(*(ReadsData(6, 6) for _ in range(4))))
        optimizer = adamw(model.parameters())
        return train(model, optimizer, 3), model, optimizer

    check(script, plan, tmp_path)


@pytest.mark.parametrize("plan", ["memory", "disk", "recompute on disk"])
def test_a_backward_after_assigned_data_raises(plan, tmp_path):
    """Plain PyTorch computes the gradient with the old values, which the weight store no longer has."""
    torch.manual_seed(0)
    model = Place(plan, tmp_path).compile(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)))
    loss = model(torch.ones(3, 6)).sum()
    model[2].weight.data = torch.zeros(2, 6)
    with pytest.raises((RuntimeError, StreamError), match=r"changed between|in place|inplace operation"):
        loss.backward()


@some_plan
def test_data_assigned_to_weights_that_backward_does_not_need(plan, tmp_path):
    def script(place):
        model = place.compile(stack())
        optimizer = adamw(model.parameters())
        losses = train(model, optimizer, 2)
        for number in range(2):
            loss = model(inputs(number)).square().mean()
            model[0][0].weight.data = model[0][0].weight.data * 0.5  # the input needs no gradient
            model[3][0].bias.data = torch.full_like(model[3][0].bias, 0.25)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return losses, model, optimizer

    check(script, plan, tmp_path)


@some_plan
def test_swapped_tensors_are_refused_once_streamed(plan, tmp_path):
    def script(place):
        model = place.compile(stack())
        torch.utils.swap_tensors(model[0][0].weight, nn.Parameter(torch.full((6, 6), 0.1)))
        return train(model, adamw(model.parameters()), 2), model

    check(script, plan, tmp_path)
    model = Place(plan, tmp_path / "again").compile(stack())
    model(inputs(0))
    before = model[0][0].weight.clone()
    with pytest.raises(StreamError, match=r"swap_tensors would give(.|\n)*parameter\.data = tensor"):
        torch.utils.swap_tensors(model[0][0].weight, nn.Parameter(torch.zeros(6, 6)))
    assert torch.equal(model[0][0].weight, before)
