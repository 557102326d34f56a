"""Layers around the calls of a module run outside of its hooks, and leave no trace when they are removed."""

import copy

import pytest
import torch
from torch import nn

from headwater.core.module_calls import replace_forward, surround


def layer_of(name, events):
    def layer(call, args, kwargs):
        events.append(f"{name} begins")
        try:
            return call(*args, **kwargs)
        finally:
            events.append(f"{name} ends")

    return layer


def test_layers_run_around_hooks_the_first_one_outermost():
    events, module = [], nn.Identity()
    module.register_forward_hook(lambda *_: events.append("hook"))
    surround(module, layer_of("first", events))
    surround(module, layer_of("second", events))
    surround(module, layer_of("outermost", events), outermost=True)
    assert module(torch.tensor(1)).item() == 1
    inner = ["outermost begins", "first begins", "second begins", "hook", "second ends", "first ends"]
    assert events == [*inner, "outermost ends"]


def test_a_module_without_layers_has_its_own_call_again():
    events, module = [], nn.Identity()
    removers = [surround(module, layer_of(name, events)) for name in "ab"]
    for remove in removers:
        remove()
        remove()  # again: nothing happens
    module(1)
    assert events == [] and "_call_impl" not in vars(module)


def test_a_layer_may_change_arguments_and_sees_errors():
    module = nn.Identity()
    surround(module, lambda call, args, kwargs: call(args[0] + 1))
    assert module(1) == 2

    class Failing(nn.Module):
        def forward(self):
            raise ValueError("within")

    events, failing = [], Failing()
    surround(failing, layer_of("a", events))
    with pytest.raises(ValueError, match="within"):
        failing()
    assert events == ["a begins", "a ends"]


def test_a_copy_of_a_module_has_no_layers():
    events, module = [], nn.Identity()
    surround(module, layer_of("a", events))
    copy.deepcopy(module)(1)
    assert events == []


def test_a_shallow_copy_of_a_module_has_no_layers():
    events, module = [], nn.Identity()
    remove = surround(module, layer_of("only", events))
    restore = replace_forward(module, lambda x: x + 1)
    other = copy.copy(module)
    assert other(1) == 1 and not events
    assert module(1) == 2 and events
    remove(), restore()
    assert other(1) == 1


def test_a_shallow_copy_keeps_a_forward_of_the_user():
    module = nn.Identity()
    module.forward = lambda x: x + 10
    replace_forward(module, lambda x: x + 1)
    assert copy.copy(module)(1) == 11 and module(1) == 2


def test_a_replaced_forward_is_restored_unless_the_user_has_replaced_it_again():
    module, x = nn.Identity(), torch.tensor(1)
    restore = replace_forward(module, lambda x: x + 1)
    assert module(x).item() == 2
    inner = replace_forward(module, lambda x: x + 2)
    restore()  # nothing happens: another forward is there
    assert module(x).item() == 3
    inner()
    assert module(x).item() == 2
    restore()
    assert "forward" not in vars(module)


def test_while_a_module_is_copied_other_threads_find_its_wrappers():
    """A checkpoint that is saved in the background copies the module while it trains."""
    module, seen = nn.Linear(1, 1), []
    surround(module, lambda call, args, kwargs: call(*args, **kwargs))

    class Watches:
        def __deepcopy__(self, memo):
            seen.append("_call_impl" in vars(module))
            return self

    module.other, module.itself = Watches(), [module]
    copied = copy.deepcopy(module)
    assert seen == [True]
    assert copied.itself[0] is copied and "_call_impl" not in vars(copied)
