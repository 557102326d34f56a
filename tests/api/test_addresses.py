"""Addresses of streamed parameters: each has its own, and its values can be read there."""

import collections
import ctypes
import gc
import threading
import time
import weakref
from types import SimpleNamespace

import pytest
import torch
from any_loop import Place, adamw, extreme_plans, randn
from safetensors.torch import _find_shared_tensors, load_file, save_file
from small_net import net, step
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from headwater.core.errors import StreamError
from headwater.core.lazy import LazyTensor
from headwater.stream import addresses
from headwater.stream.home import Home

VIEWS = {
    "parameter": lambda p: p,
    "data": lambda p: p.data,
    "row": lambda p: p[1],
    "row of the data": lambda p: p.data[1],
    "turned": lambda p: p.data.t()[2],
}


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
    assert found.storage_offset() == expected.storage_offset()
    assert values_at(found.data_ptr(), 1) == expected[(0,) * expected.ndim]


@extreme_plans
def test_a_view_of_another_dtype_has_an_address_within_the_parameter(trained):
    model, _, _ = trained
    weight = model[0].weight
    row = weight.data.view(torch.int16)[1]
    assert row.data_ptr() - weight.data_ptr() == 24
    used = torch.empty(0, dtype=torch.int16)
    used.set_(row.untyped_storage(), row.storage_offset(), row.shape, row.stride())
    assert torch.equal(used.view(torch.float32), weight[1])


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.turn = nn.Parameter(randn(6, 6, seed=2).to(torch.complex64))

    def forward(self, x):
        return self.last((self.first(x).to(torch.complex64) @ self.turn).real)


@extreme_plans
def test_a_recorded_view_of_another_dtype_has_an_address_within_the_parameter(plan, tmp_path):
    place = Place(plan, tmp_path)
    model = place.compile(Complex())
    step(model, torch.optim.SGD(model.parameters(), 0.1))
    view = torch.view_as_real(model.turn)
    assert view.requires_grad and view[1].data_ptr() - model.turn.data_ptr() == 6 * 8
    assert torch.equal(values_at(view[1].data_ptr(), 12), view[1].detach().flatten())
    place.release()


@extreme_plans
@pytest.mark.parametrize("take", [lambda p: p, lambda p: p.data, lambda p: p.detach()])
def test_the_address_of_a_weight_in_autocast_has_the_values_of_the_master(take, plan, tmp_path):
    place = Place(plan, tmp_path)
    model = place.compile(net())
    optimizer = adamw(model.parameters())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(randn(3, 6, seed=1)).float().square().mean().backward()
    optimizer.step()
    weight = model[0].weight
    assert weight.home.spec.wire_dtype == torch.bfloat16
    found = take(weight)
    assert found.data_ptr() == found.untyped_storage().data_ptr()
    assert torch.equal(values_at(found.data_ptr(), 36), weight.detach().clone().flatten())
    place.release()


@extreme_plans
def test_the_copies_are_freed_before_a_forward(trained):
    model, _, _ = trained
    address = model[0].weight.data_ptr()
    assert addresses._filled and values_at(address, 36).any()
    model(randn(3, 6, seed=1))
    assert not addresses._filled and not values_at(address, 36).any()
    assert model[0].weight.data_ptr() == address and values_at(address, 36).any()


def read_elsewhere(params):
    """Return the addresses of parameters, and a function that ends the thread that has asked for them."""
    found, asked, done = [], threading.Event(), threading.Event()

    def ask():
        found.extend(param.data_ptr() for param in params)
        asked.set()
        done.wait()

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    asked.wait()

    def end():
        done.set()
        thread.join()

    return found, end


@extreme_plans
def test_a_forward_frees_no_copies_that_another_thread_reads(trained):
    model, _, _ = trained
    (address,), end = read_elsewhere([model[0].weight])
    model(randn(3, 6, seed=1))
    assert torch.equal(values_at(address, 36), model[0].weight.detach().clone().flatten())
    end()
    model(randn(3, 6, seed=1))
    assert not addresses._filled and not values_at(address, 36).any()


@extreme_plans
def test_copies_of_former_values_are_freed_for_every_thread(trained):
    model, optimizer, _ = trained
    (address,), end = read_elsewhere([model[0].weight])
    step(model, optimizer)
    model(randn(3, 6, seed=1))
    assert not addresses._filled and not values_at(address, 36).any()
    end()


@extreme_plans
def test_a_model_that_has_shown_addresses_is_freed(plan, tmp_path):
    model = Place(plan, tmp_path).compile(net())
    step(model, torch.optim.SGD(model.parameters(), 0.1))
    weight = model[0].weight
    storage, expected = weight.untyped_storage(), weight.detach().clone().flatten()
    store = vars(model)["_headwater"].engine.store
    references = [weakref.ref(each) for each in (model, weight, store)]
    del model, weight, store
    for _ in range(600):  # a thread that reads ahead refers to the store until it has read
        gc.collect()
        if not any(reference() for reference in references):
            break
        time.sleep(0.05)
    assert [reference() for reference in references] == [None] * 3
    assert torch.equal(torch.empty(0).set_(storage), expected)


@extreme_plans
@pytest.mark.parametrize(
    "take",
    [
        lambda optimizer, weight: optimizer.state[weight]["exp_avg"],
        lambda optimizer, weight: optimizer.state[weight]["exp_avg"].data,
        lambda optimizer, weight: optimizer.state_dict()["state"][0]["exp_avg"],
    ],
)
def test_optimizer_state_has_addresses_with_its_values(take, trained, tmp_path):
    model, optimizer, _ = trained
    weight = model[0].weight
    state = take(optimizer, weight)
    for _ in range(2):
        save_file({"state": state}, tmp_path / "saved")
        expected = optimizer.state[weight]["exp_avg"].clone()
        assert torch.equal(load_file(tmp_path / "saved")["state"], expected)
        address = take(optimizer, weight).data_ptr()
        assert torch.equal(torch.empty(0).set_(state.untyped_storage()), expected.flatten())
        assert isinstance(state, LazyTensor) or torch.equal(values_at(address, 36), expected.flatten())
        step(model, optimizer)


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


def count_reads(monkeypatch):
    """Count the reads of each parameter from the weight store."""
    reads = collections.Counter()
    read = Home.read_on_host

    def counted(home):
        reads[home.spec.name] += 1
        return read(home)

    monkeypatch.setattr(Home, "read_on_host", counted)
    return reads


@extreme_plans
def test_values_are_copied_again_only_after_a_change(trained, monkeypatch):
    model, optimizer, _ = trained
    weight = model[0].weight
    reads = count_reads(monkeypatch)

    def ask():
        reads.clear()
        address = weight.data_ptr()
        assert weight.untyped_storage().data_ptr() == weight.detach().data_ptr() == address
        return address, reads["0.weight"]

    address, count = ask()
    assert count == 1
    assert ask() == (address, 0)
    with torch.no_grad():
        weight.mul_(2)
    assert ask() == (address, 1)
    assert torch.equal(values_at(address, 36), weight.detach().clone().flatten())
    model.load_state_dict(net().state_dict())
    assert ask() == (address, 1)
    step(model, optimizer)
    assert ask() == (address, 1)
    assert torch.equal(values_at(address, 36), weight.detach().clone().flatten())


@extreme_plans
@pytest.mark.parametrize("use", [lambda storage: storage, lambda storage: torch.empty(0).set_(storage)])
def test_a_storage_that_is_used_is_not_freed(use, trained):
    model, optimizer, _ = trained
    weight = model[0].weight
    used = use(weight.detach().untyped_storage())
    address, before = weight.data_ptr(), weight.detach().clone().flatten()
    step(model, optimizer)
    assert torch.equal(values_at(address, 36), before)
    assert weight.data_ptr() == address  # the new values are there now, as in plain PyTorch
    assert torch.equal(values_at(address, 36), weight.detach().clone().flatten())
    del used
    model(randn(3, 6, seed=1))
    assert not values_at(address, 36).any()


class Shrinking(nn.Linear):
    """A layer whose forward changes its own weight."""

    def forward(self, x):
        with torch.no_grad():
            self.weight.data.mul_(0.9)
        return super().forward(x)


@extreme_plans
def test_values_that_a_forward_writes_are_at_the_address_of_a_storage_that_is_used(plan, tmp_path):
    place = Place(plan, tmp_path)
    model = place.compile(nn.Sequential(*(Shrinking(6, 6) for _ in range(3))))
    inputs, weight = randn(3, 6, seed=1), model[0].weight
    model(inputs)
    view = weight[0]  # autograd records it
    used, before = weight.untyped_storage(), weight.detach().clone()
    with torch.no_grad():
        model(inputs)
    expected = before * 0.9
    assert torch.equal(weight.detach().clone(), expected)
    assert torch.equal(values_at(weight.data_ptr(), 36), expected.flatten())
    assert torch.equal(view.detach(), expected[0])
    assert used.data_ptr() == weight.data_ptr()
    place.release()


@extreme_plans
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_a_storage_has_the_bytes_of_its_parameter(trained):
    model, _, _ = trained
    for param in model.parameters():
        storage, typed = param.untyped_storage(), param.detach().storage()
        assert storage.nbytes() == param.nbytes and len(typed) == param.numel()
        assert typed.dtype == param.dtype and typed.data_ptr() == storage.data_ptr() == param.data_ptr()
        with pytest.raises(StreamError, match="copy of values"):
            storage.fill_(1)
        with pytest.raises(StreamError, match="copy of values"):
            typed.fill_(1)


@extreme_plans
def test_transformers_writes_weights_with_few_reads(plan, tmp_path, monkeypatch):
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=60
    )
    place = Place(plan, tmp_path)
    model = place.compile(LlamaForCausalLM(config))
    tokens = torch.arange(8).reshape(1, 8)
    model(input_ids=tokens, labels=tokens).loss.backward()
    adamw(model.parameters()).step()
    reads = count_reads(monkeypatch)
    model.save_pretrained(tmp_path / "saved")
    assert {*reads.values()} <= {1}
    place.release()
    saved = load_file(tmp_path / "saved/model.safetensors")
    assert all(torch.equal(saved[name], param) for name, param in model.named_parameters())
