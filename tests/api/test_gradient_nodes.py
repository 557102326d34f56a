"""Hooks at the node that accumulates a gradient are called, or a clear error says why they are not."""

import warnings

import pytest
import torch
from any_loop import Place, assert_equal, extreme_plans
from torch import nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook

import headwater as cstorch
from headwater.core.errors import StreamError


def multi(model, seen):
    return register_multi_grad_hook(
        list(model.parameters()), lambda grads: seen.append([grad.float().sum().item() for grad in grads])
    )


def multi_any(model, seen):
    return register_multi_grad_hook(list(model.parameters()), lambda grad: seen.append("any"), mode="any")


def node_prehook(model, seen):
    node = get_gradient_edge(model[0].weight).node
    node.register_prehook(lambda grads: seen.append(len(grads)))
    return [node]  # a node is found if an object holds it


def node_hook(model, seen):
    node = get_gradient_edge(model[0].weight).node
    node.register_hook(lambda inputs, outputs: seen.append((len(inputs), len(outputs))))
    return [node]  # a node is found if an object holds it


every_hook = pytest.mark.parametrize("register", [multi, multi_any, node_prehook, node_hook])
at_a_node = pytest.mark.parametrize("register", [multi, node_prehook, node_hook])


def run(place, register, *, registered_at, precision):
    """Return what the hook has seen in three steps, and the weights."""
    torch.manual_seed(0)
    model = place.compile(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen, inputs = [], torch.randn(4, 6)
    for step in range(3):
        if step == registered_at:
            held = register(model, seen)
        with torch.autocast("cpu", precision, enabled=precision is not None):
            loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    del held
    return seen, [param.detach().clone() for param in model.parameters()]


@extreme_plans
@every_hook
@pytest.mark.parametrize(("registered_at", "precision"), [(0, None), (1, None), (1, torch.bfloat16)])
def test_hooks_at_gradient_nodes_equal_plain(plan, register, registered_at, precision, tmp_path):
    when = {"registered_at": registered_at, "precision": precision}
    plain, place = run(Place(None, tmp_path), register, **when), Place(plan, tmp_path)
    assert_equal(run(place, register, **when), plain)
    assert len(plain[0]) == 3 - registered_at
    with warnings.catch_warnings(action="ignore"):  # the next test is about the warning
        place.release()


@at_a_node
def test_a_hook_that_would_never_be_called_is_refused(register, tmp_path):
    place = Place("memory", tmp_path)
    with pytest.raises(StreamError, match=r"would not be called(.|\n)*after this forward"):
        run(place, register, registered_at=0, precision=torch.bfloat16)
    place.release()


@at_a_node
def test_a_hook_that_is_not_called_after_release_is_warned_of(register, tmp_path):
    model = nn.Sequential(nn.Linear(6, 6))
    cstorch.compile(model, cstorch.backend("CSX"))
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.randn(4, 6)).sum().backward()
    held = register(model, [])
    with pytest.warns(UserWarning, match="not called any more"):
        cstorch.release(model)
    del held


def test_nothing_is_refused_or_warned_of_without_such_a_hook(tmp_path):
    place = Place("memory", tmp_path)
    with warnings.catch_warnings(action="error"):
        run(place, lambda model, seen: None, registered_at=0, precision=torch.bfloat16)
        place.release()
