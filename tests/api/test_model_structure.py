"""The structure of a model is compared with an earlier one."""

import types

import pytest
import torch
from torch import nn

from headwater.api.model_structure import Structure, has_replaced_parameters


def model():
    return nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))


def replace_parameter(net):
    net[1][0].weight = nn.Parameter(net[1][0].weight.detach().clone())


def swap(net):
    net[0], net[1][0] = net[1][0], net[0]


def move_to_the_next_module(net):
    """Move entries to the next module; names, objects and their order stay."""
    net[0].bias, net[1].bias = None, net[0].bias
    del net[0]._parameters["bias"]


def own_forward(net):
    net[0].forward = types.MethodType(lambda self, x: x, net[0])


CHANGES = {
    "1.0.weight was replaced": replace_parameter,
    "0 was replaced": swap,
    "1.bias was added": move_to_the_next_module,
    "2 was added": lambda net: net.append(nn.ReLU()),
    "1 was removed": lambda net: net.pop(1),
    "0.bias was removed": lambda net: net[0].register_parameter("bias", None),
    "the class or the forward of a module was replaced": own_forward,
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_structural_change_is_detected_named_and_undone(what):
    net = model()
    before = Structure(net)
    assert before.is_current
    CHANGES[what](net)
    now = Structure(net)
    assert not before.is_current and now.is_current
    assert before.difference(now) == what
    with before.restored():
        assert before.is_current
    assert now.is_current


def test_buffers_hooks_modes_and_values_are_not_structural_changes():
    net = model()
    before = Structure(net)
    net(torch.randn(4, 3)).sum().backward()
    net[1][1].running_mean = torch.zeros(3)
    net[0].register_forward_hook(lambda module, args, output: None)
    net.eval().requires_grad_(False)
    assert before.is_current


def test_old_names_of_moved_parameters_are_found():
    net = model()
    before = Structure(net)
    net.insert(0, nn.Linear(3, 3))
    net[2][1].weight = net[1].bias
    assert before.old_names(Structure(net)) == {
        "1.weight": "0.weight",
        "1.bias": "0.bias",
        "2.0.weight": "1.0.weight",
        "2.0.bias": "1.0.bias",
        "2.1.bias": "1.1.bias",
    }


@pytest.mark.parametrize("kind", [nn.Parameter, torch.clone])
def test_parameters_of_a_functional_call_are_recognised(kind):
    net = model()
    seen = []
    net.register_forward_pre_hook(lambda module, args: seen.append(has_replaced_parameters(net)))
    lent = {"0.weight": kind(torch.zeros(3, 3))}
    torch.func.functional_call(net, lent, (torch.randn(4, 3),))
    net(torch.randn(4, 3))
    assert seen == [True, False]
