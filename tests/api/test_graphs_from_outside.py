"""Forwards that use graphs or leaves recorded outside of the call, which a dry run must leave as they are."""

import pytest
import torch
from any_loop import check, extreme_plans, some_plan
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import headwater as cstorch
from headwater.core.errors import StreamError


class UsesWeight(nn.Module):
    """A model that uses the weight of a layer without a call of that layer."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x):
        return self.head(F.linear(self.first(x), self.middle.weight, self.middle.bias).tanh())


def train(model, optimizer, steps=1, rows=4):
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(rows, 6)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, fused=True)


@extreme_plans
@pytest.mark.parametrize("first", [0, 1])
def test_a_pruned_weight_is_used_without_a_call_of_its_layer(first, plan, tmp_path):
    """`prune` has computed the weight once; its graph serves a single backward."""

    def script(place):
        model = place.compile(UsesWeight())
        losses = train(model, sgd(model), first)
        prune.l1_unstructured(model.middle, "weight", 0.3)
        losses += train(model, sgd(model))
        return losses, model

    check(script, plan, tmp_path)


class Conditioned(nn.Module):
    """A model that adds a condition that the loop has computed before the call."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(6, 6), nn.Linear(6, 2)
        self.condition = None

    def forward(self, x):
        return self.head(self.first(x) * self.condition)


@extreme_plans
def test_an_attribute_computed_by_another_model_trains_that_model(plan, tmp_path):
    def script(place):
        encoder, model, losses = nn.Sequential(nn.Linear(3, 6), nn.Tanh()), Conditioned(), []
        place.compile(model)
        optimizer = torch.optim.AdamW([*model.parameters(), *encoder.parameters()], fused=True)
        for _ in range(2):
            model.condition = encoder(torch.randn(3))
            losses += train(model, optimizer)
        return losses, model, encoder

    check(script, plan, tmp_path)


class Offset(nn.Module):
    """A model that adds a tensor that requires a gradient, and is not a parameter."""

    def __init__(self, where):
        super().__init__()
        self.first, self.head = nn.Linear(6, 6), nn.Linear(6, 2)
        self.where, self.offset, self.offsets = where, None, []
        offset = torch.randn(6).requires_grad_()
        if where == "attribute":
            self.offset = offset
        else:
            self.offsets.append(offset)

    @property
    def leaf(self):
        return self.offset if self.where == "attribute" else self.offsets[0]

    def forward(self, x):
        return self.head(self.first(x) + self.leaf)


@some_plan
@pytest.mark.parametrize("where", ["attribute", "list"])
def test_a_tensor_that_is_not_a_parameter_gets_the_gradient_of_the_backward_alone(where, plan, tmp_path):
    def script(place):
        model = place.compile(Offset(where))
        losses = train(model, sgd(model), 2)
        return losses, model, model.leaf.grad

    check(script, plan, tmp_path)


class Checkpointed(UsesWeight):
    """A model that uses a weight inside of a checkpoint, after a use outside of it."""

    def forward(self, x):
        x = F.linear(self.first(x), self.middle.weight, self.middle.bias)
        return checkpoint(self.head, x.tanh(), use_reentrant=True)


def test_a_reentrant_checkpoint_beside_an_outer_graph_is_refused():
    model = Checkpointed()
    prune.l1_unstructured(model.middle, "weight", 0.3)
    model = cstorch.compile(model, cstorch.backend("CSX", tier="memory"))
    with pytest.raises(StreamError, match="use_reentrant=False"):
        model(torch.randn(4, 6))
