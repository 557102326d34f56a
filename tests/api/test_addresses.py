"""Addresses of streamed parameters: each has its own, and its values can be read there."""

import ctypes
from types import SimpleNamespace

import pytest
import torch
from any_loop import Place, adamw, extreme_plans, randn
from safetensors.torch import _find_shared_tensors, load_file, save_file
from torch import nn

from headwater.core.errors import StreamError
from headwater.stream import addresses

VIEWS = {
    "parameter": lambda p: p,
    "data": lambda p: p.data,
    "row": lambda p: p[1],
    "row of the data": lambda p: p.data[1],
    "turned": lambda p: p.data.t()[2],
}


def net():
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
    with torch.no_grad():
        model[1].weight.data = model[1].weight.t()  # dense, but not row-major
    return model


def step(model, optimizer):
    model(randn(3, 6, seed=1)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture
def trained(plan, tmp_path):
    place = Place(plan, tmp_path)
    model = place.compile(net())
    optimizer = adamw(model.parameters())
    step(model, optimizer)
    yield model, optimizer, place
    place.release()


def addresses_of(model):
    return [param.data_ptr() for param in model.parameters()]


def values_at(address, count):
    return torch.tensor((ctypes.c_float * count).from_address(address)[:])


@extreme_plans
def test_each_parameter_has_its_own_address(trained):
    model, optimizer, place = trained
    before = addresses_of(model)
    assert len({*before}) == len(before)
    assert [param.data.data_ptr() for param in model.parameters()] == before
    assert [param.untyped_storage().data_ptr() for param in model.parameters()] == before
    assert [param.data.untyped_storage().data_ptr() for param in model.parameters()] == before
    step(model, optimizer)
    assert addresses_of(model) == before
    with torch.no_grad():
        model[0].weight.mul_(2)
    assert addresses_of(model) == before
    place.release()
    assert not {*addresses_of(model)} & {*before}


@extreme_plans
def test_values_are_at_the_addresses(trained):
    model, _, _ = trained
    for param, address in [(param, param.data_ptr()) for param in model.parameters()]:
        memory = param.detach().clone()
        expected = memory.as_strided((memory.numel(),), (1,))
        assert torch.equal(values_at(address, param.numel()), expected)


@extreme_plans
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("layer", [0, 1])
def test_views_have_addresses_within_the_parameter(view, layer, trained):
    model, _, _ = trained
    weight = model[layer].weight
    plain = weight.detach().clone()
    found, expected = VIEWS[view](weight), VIEWS[view](plain)
    assert found.data_ptr() - weight.data_ptr() == expected.data_ptr() - plain.data_ptr()
    assert found.untyped_storage().data_ptr() == weight.data_ptr()
    assert values_at(found.data_ptr(), 1) == expected[(0,) * expected.ndim]


@extreme_plans
def test_the_copies_are_freed_before_a_forward(trained):
    model, _, _ = trained
    address = model[0].weight.data_ptr()
    assert addresses._filled and values_at(address, 36).any()
    model(randn(3, 6, seed=1))
    assert not addresses._filled and not values_at(address, 36).any()
    assert model[0].weight.data_ptr() == address and values_at(address, 36).any()


@extreme_plans
def test_an_address_without_memory_for_the_values_is_refused(trained, monkeypatch):
    model, _, _ = trained
    monkeypatch.setattr(addresses.psutil, "virtual_memory", lambda: SimpleNamespace(available=36 * 4))
    with pytest.raises(StreamError, match=r"data_ptr\(\)(.|\n)*shape \[6, 6\](.|\n)*by id\(\)"):
        model[0].weight.data_ptr()


@extreme_plans
@pytest.mark.parametrize("take", [lambda p: p, lambda p: p.data, lambda p: p.detach()])
def test_safetensors_saves_parameters(take, trained, tmp_path):
    model, _, _ = trained
    del model[1]  # safetensors refuses its strides
    save_file({name: take(param) for name, param in model.named_parameters()}, tmp_path / "saved")
    saved = load_file(tmp_path / "saved")
    assert saved.keys() == {name for name, _ in model.named_parameters()}
    assert all(torch.equal(saved[name], param) for name, param in model.named_parameters())


@extreme_plans
def test_each_name_of_a_tied_weight_has_the_same_address_in_a_state_dict(plan, tmp_path):
    place = Place(plan, tmp_path)
    model = net()
    model[3].weight = model[0].weight
    model = place.compile(model)
    step(model, adamw(model.parameters()))
    state = model.state_dict()
    assert _find_shared_tensors(state)[0] == {"0.weight", "3.weight"}
    first, second = state["0.weight"], state["3.weight"]
    assert first.data_ptr() == second.data_ptr() == first.untyped_storage().data_ptr()
    assert first.data_ptr() == model[0].weight.data_ptr()
    with torch.no_grad():
        model[0].weight.mul_(2)
    assert torch.equal(values_at(second.data_ptr(), 36), model[0].weight.flatten())
    place.release()


@extreme_plans
def test_an_empty_parameter_has_no_address(plan, tmp_path):
    place = Place(plan, tmp_path)
    model = net()
    model[2].register_parameter("empty", nn.Parameter(torch.empty(0, 3)))
    model = place.compile(model)
    step(model, adamw(model[:2].parameters()))
    assert model[2].empty.data_ptr() == 0 and model[2].empty.data.data_ptr() == 0
    place.release()
