"""Calls that torch records or compiles as a whole, and other uses that a streamed model refuses."""

import copy

import pytest
import torch
from any_loop import Place, check, extreme_plans, randn, train
from torch import nn

import headwater as hw
from headwater.core.errors import StreamError

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.*is deprecated:DeprecationWarning")


def stack():
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("record", ["torch.jit.trace", "torch.export.export"])
def test_a_record_of_a_streamed_model_is_refused_and_one_of_a_copy_works(record, is_first, tmp_path):
    place = Place("slabs", tmp_path)
    model = place.compile(stack())
    x = randn(4, 6, seed=0)
    if not is_first:
        model(x).sum().backward()

    def recorded(model):
        if record == "torch.jit.trace":
            return torch.jit.trace(model, x)
        return torch.export.export(model, (x,)).module()

    with pytest.raises(StreamError, match=f"{record} cannot record") as caught:
        recorded(model)
    assert f"{record}(copy.deepcopy(model), ...)" in caught.value.remedy
    assert torch.equal(recorded(copy.deepcopy(model))(x), model(x))
    place.release()


def test_a_strict_export_names_the_remedy(tmp_path):
    place = Place("memory", tmp_path)
    model = place.compile(stack())
    model(randn(4, 6, seed=0))
    with pytest.raises(Exception, match=r"export\(copy\.deepcopy\(model\), \.\.\.\)"):
        torch.export.export(model, (randn(4, 6, seed=0),), strict=True)
    place.release()


def test_a_model_that_torch_has_compiled_is_refused():
    model = stack()
    with pytest.raises(StreamError, match=r"the result of torch\.compile\(model\)"):
        hw.compile(torch.compile(model, backend="eager"), hw.backend("CSX"))
    hw.release(hw.compile(model, hw.backend("CSX")))


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x: self.layer(x).sin(), lambda x: self.layer(x).cos(), (x,))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_operators_that_call_functions_are_refused(tmp_path):
    place = Place("memory", tmp_path)
    model = place.compile(nn.Sequential(Branches(), nn.Linear(6, 6)))
    with pytest.raises(StreamError, match="torch's operator 'cond'") as caught:
        model(randn(4, 6, seed=0))
    assert "`if`" in caught.value.remedy
    place.release()


class Unique:
    """An object that cannot be copied."""

    scale = 2.0

    def __deepcopy__(self, memo):
        raise RuntimeError("there is only one")


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = stack()

    def forward(self, x, unique):
        return self.layers(x) * unique.scale


@extreme_plans
def test_an_argument_that_cannot_be_copied_is_shared(plan, tmp_path):
    def script(place):
        model = place.compile(Scaled())
        return train(model, lambda number: model(randn(4, 6, seed=number), Unique()).square().mean())

    check(script, plan, tmp_path)


def test_a_tensor_that_torch_makes_without_values_is_refused(tmp_path):
    place = Place("memory", tmp_path)
    model = place.compile(stack())
    model(randn(4, 6, seed=0))
    with pytest.raises(StreamError, match="without values"):
        torch.FloatTensor(model[0].weight.detach()).sum()
    place.release()
