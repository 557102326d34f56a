"""Hooks and forwards that store values: the dry run and recomputation leave no trace in them."""

import dataclasses
from collections import OrderedDict

import pytest
import torch
from any_loop import Place, adamw, check
from test_changed_models import inputs, stack, train
from torch import nn

import headwater as cstorch

plans = pytest.mark.parametrize("plan", ["memory", "recompute"])

seen_by_all = []
calls_of_all = 0


@dataclasses.dataclass
class Features:
    """A hook that collects outputs, as feature extractors do."""

    last: torch.Tensor | None = None
    means: dict[str, list[float]] = dataclasses.field(default_factory=dict)

    def hook(self, module, args, output):
        self.last = output
        self.means.setdefault("mean", []).append(output.mean().item())


def count_globally(module, args):
    global calls_of_all
    calls_of_all += 1
    seen_by_all.append(args[0].tolist())


@plans
@pytest.mark.parametrize("where", [lambda model: model[1], lambda model: model[1][0]], ids=["unit", "inside"])
def test_hooks_see_each_forward_once_and_real_values(plan, where, tmp_path):
    def script(place):
        global calls_of_all
        seen_by_all.clear()
        calls_of_all = 0
        model = place.compile(stack())
        features, outputs, gradients = Features(), [], []
        module = where(model)
        module.register_forward_hook(features.hook)
        module.register_forward_hook(lambda module, args, output: outputs.append(output.detach()))
        module.register_forward_pre_hook(count_globally)
        module.register_full_backward_hook(lambda module, inner, outer: gradients.append(outer[0]))
        losses = train(model, adamw(model.parameters()))
        shown = [features.last, features.means, outputs, gradients, list(seen_by_all), calls_of_all]
        assert calls_of_all == len(outputs) == len(gradients) == 3
        return losses, shown, model

    check(script, plan, tmp_path)


class Watching(nn.Module):
    """A module whose forward appends to a global list."""

    def __init__(self):
        super().__init__()
        self.inner = stack()

    def forward(self, x):
        x = self.inner(x)
        seen_by_all.append(x.sum().item())
        return x


@plans
def test_a_forward_that_appends_to_a_global_list(plan, tmp_path):
    def script(place):
        seen_by_all.clear()
        model = place.compile(nn.Sequential(Watching(), nn.Linear(6, 6)))
        return train(model, adamw(model.parameters())), list(seen_by_all), model

    check(script, plan, tmp_path)


class Found(Exception):
    """Raised by a hook to end a forward early."""


@plans
def test_a_hook_may_end_the_forward_by_an_exception(plan, tmp_path):
    def script(place):
        model = place.compile(stack())
        found = []

        def stop(module, args, output):
            found.append(output)
            raise Found

        handle = model[1].register_forward_hook(stop)
        with torch.no_grad():
            for number in range(2):
                with pytest.raises(Found):
                    model(inputs(number))
        handle.remove()
        return found, train(model, adamw(model.parameters())), model

    check(script, plan, tmp_path)


def test_an_error_that_only_the_dry_run_has_is_raised(tmp_path):
    class OnlyReal(nn.Linear):
        def forward(self, x):
            if torch._C._len_torch_dispatch_stack():
                raise RuntimeError("not in a dry run")
            return super().forward(x)

    model = Place("memory", tmp_path).compile(OnlyReal(6, 6))
    with pytest.raises(RuntimeError, match="not in a dry run"):
        model(inputs(0))
    cstorch.release(model)


class Activations(OrderedDict):
    """A dictionary that returns an instance of a class on each read, like the activations of transformers."""

    def __getitem__(self, key):
        return super().__getitem__(key)()


ACTIVATIONS = Activations(gelu=nn.GELU, relu=nn.ReLU)


class Reading(nn.Module):
    """A module whose forward reads a global table and its own table."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.table = Activations(relu=nn.ReLU)

    def forward(self, x):
        return self.table["relu"](ACTIVATIONS["gelu"](self.layer(x)))


@plans
def test_dictionaries_that_create_items_on_read_are_unchanged(plan, tmp_path):
    def script(place):
        torch.manual_seed(0)
        network = nn.Sequential(Reading(nn.Linear(6, 6)), Reading(nn.Linear(6, 3)))
        model = place.compile(network)
        losses = train(model, adamw(model.parameters()))
        return losses, [len(ACTIVATIONS), [len(part.table) for part in network]], model

    check(script, plan, tmp_path)
    assert ACTIVATIONS["relu"].__class__ is nn.ReLU
