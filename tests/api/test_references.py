"""Tensors that a script made from parameters before the first forward."""

import contextlib
import warnings

import numpy as np
import pytest
import torch
from any_loop import Place, odd_plans
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import headwater as hw
from headwater.api.references import StaleTensorWarning


def compiled():
    return hw.compile(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), hw.backend("CSX"))


@pytest.mark.parametrize(
    "take",
    [
        lambda model: model[0].weight.detach(),
        lambda model: model[0].weight.data[:2],
        lambda model: model.state_dict(),
        lambda model: model[0].weight.detach().numpy(),
    ],
    ids=["detach", "view", "state_dict", "numpy"],
)
def test_a_warning_names_tensors_taken_before_the_first_forward(take):
    model = compiled()
    kept = take(model)
    expected = r"made from 0\.weight.* before the first forward with it keeps"
    with pytest.warns(StaleTensorWarning, match=expected):
        model(torch.randn(3, 4))
    assert kept is not None


def test_a_warning_names_tensors_taken_from_new_parameters():
    model, batch = compiled(), torch.randn(3, 4)
    model(batch)
    model[2] = nn.Linear(8, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", StaleTensorWarning)
        model(batch)
    model[0].weight = nn.Parameter(torch.randn(8, 4))
    kept = model[0].weight.detach()
    with pytest.warns(StaleTensorWarning, match=r"made from 0\.weight before"):
        model(batch)
    assert kept is not None


def test_a_warning_names_parameters_whose_array_has_another_tensor():
    array = np.zeros((2, 4), np.float32)
    layer = nn.Linear(4, 2)
    layer.weight = nn.Parameter(torch.from_numpy(array))
    kept = torch.from_numpy(array)
    with pytest.warns(StaleTensorWarning, match="made from weight"):
        hw.compile(layer, hw.backend("CSX"))(torch.randn(3, 4))
    assert kept is not None


def test_copies_and_deleted_tensors_cause_no_warning():
    model = compiled()
    kept = [model[0].weight.detach().clone(), model[0].weight.t, [p.shape for p in model.parameters()]]
    model.state_dict()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", StaleTensorWarning)
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
    assert kept


def test_a_graph_that_a_mode_has_seen_causes_no_warning():
    model = compiled()
    inputs = torch.randn(3, 4, requires_grad=True)  # so the graph saves views of the weights
    with Seeing():
        loss = nn.Sequential(*model).forward(inputs).sum()
    with warnings.catch_warnings():
        warnings.simplefilter("error", StaleTensorWarning)
        model(torch.randn(3, 4))
    assert loss.requires_grad


class KeepsView(nn.Linear):
    """A layer whose forward keeps a view of its weight."""

    recorded = True

    def forward(self, x):
        with torch.set_grad_enabled(self.recorded):
            self.kept = self.weight[0]
        return super().forward(x)


def steps(model, count):
    """Take optimizer steps; return the numbers of those with a warning of a view."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    warned = []
    for number in range(1, count + 1):
        loss = model(torch.ones(3, 4)).square().sum()
        loss.backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        messages = [str(each.message) for each in caught if each.category is StaleTensorWarning]
        assert all("a view of 0.weight that was made in a forward" in each for each in messages)
        warned += [number] * len(messages)
        optimizer.zero_grad()
    return warned


@odd_plans
@pytest.mark.parametrize("recorded", [True, False])
def test_a_warning_names_views_that_a_forward_keeps(plan, recorded, tmp_path):
    """In plain PyTorch the view follows the step."""
    kept = {}
    for where in (None, plan):
        torch.manual_seed(0)
        place = Place(where, tmp_path)
        model = place.compile(nn.Sequential(KeepsView(4, 4), nn.Tanh(), nn.Linear(4, 4)))
        model[0].recorded = recorded
        assert steps(model, 5) == ([] if where is None else [1, 2, 4])
        view = model[0].kept.detach().clone()  # before the weight is read, which may apply the update
        kept[where] = torch.equal(view, model[0].weight[0])
        place.release()
    assert kept == {None: True, plan: False}


class Seeing(TorchDispatchMode):
    """Gives each tensor that an operator reads a Python object, as a kernel in Python does."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("seen", [contextlib.nullcontext, Seeing])
@odd_plans
def test_graphs_and_detached_weights_cause_no_warning_of_views(plan, seen, tmp_path):
    place = Place(plan, tmp_path)
    model = place.compile(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)))
    model(torch.ones(3, 4))
    with seen():
        loss = model(torch.ones(3, 4)).sum()  # its graph refers to the weights
    assert steps(model, 4) == []
    between = model[0].weight.detach()[0]
    assert steps(model, 4) == [] and torch.equal(between, model[0].weight[0])  # it follows the steps
    assert loss.requires_grad
    place.release()


@pytest.mark.parametrize("part", ["all", "view"])
def test_a_warning_names_parameters_whose_assigned_tensor_changes(part):
    """Libraries assign views of one flat tensor, and update the flat tensor."""
    model = hw.compile(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), hw.backend("CSX"))
    model(torch.ones(2, 4))
    flat = torch.zeros(4, 4) if part == "all" else torch.zeros(20)
    values = flat if part == "all" else flat[:16].view(4, 4)
    model[1].weight.data = values
    flat[16:].add_(1)  # another part, if there is one
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.ones(2, 4))
    flat.add_(1)
    with pytest.warns(StaleTensorWarning, match="the data of 1.weight"):
        model(torch.ones(2, 4))
    model[1].weight.data = values
    backup, model[1].weight.data = model[1].weight.data, torch.ones(4, 4)
    flat.add_(1)  # not its values any more
    model[1].weight.data = backup
    model[1].weight.data.mul_(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.ones(2, 4))
