"""After `release` all tensors of a model that was trained on a GPU are in host memory."""

import dataclasses

import pytest
import torch
from any_loop import Net, adamw, assert_equal, batches, loss_of
from tests.device_double import DeviceDouble, stand_in_for_cuda
from tests.fake_cuda import META, OnFakeCuda, fake_cuda
from torch import nn

import headwater as hw
from headwater.api.compile import streamed
from headwater.plan.predict import NOMINAL
from headwater.stream.engine import Engine
from headwater.stream.parameters import ParameterAtRest
from headwater.stream.stage_parameters import StageParameters

RATES = dataclasses.replace(NOMINAL, link_bytes_per_s=1e9, memory_bytes_per_s=1e12)
CPU = torch.device("cpu")


class OnGpu(nn.Parameter):
    """A parameter that claims to be on a GPU as long as its memory is a placeholder: one repeated element."""

    @property
    def device(self):
        return META if self.numel() > 1 and not any(self.stride()) else CPU


@pytest.fixture
def double(monkeypatch):
    """A device double. A detached engine leaves placeholders on a GPU that does not exist."""
    device = DeviceDouble(1)
    stand_in_for_cuda(device, monkeypatch)
    monkeypatch.setattr("headwater.api.planner.device_of", lambda config: "cuda")
    monkeypatch.setattr("headwater.api.planner.calibrate", lambda *_, **__: RATES)
    monkeypatch.setattr("headwater.api.planner.warn_of_budgets", lambda *_: None)  # they ask CUDA
    detach = Engine.detach

    def detach_on_gpu(engine):
        detach(engine)
        for _, param in engine.parameters():
            param.__class__ = OnGpu

    monkeypatch.setattr(Engine, "detach", detach_on_gpu)
    yield device
    device.end()


def trained(model):
    """Train for two steps, and compute another gradient. Return the optimizer."""
    torch.manual_seed(2)
    optimizer = adamw(model.parameters())
    for inputs, targets in batches(2):
        optimizer.zero_grad()
        loss_of(model(inputs), targets).backward()
        optimizer.step()
    optimizer.zero_grad()
    ((inputs, targets),) = batches(1, seed=9)
    loss_of(model(inputs), targets).backward()
    return optimizer


@pytest.mark.parametrize("stages", [0, 2])
def test_a_released_model_is_in_host_memory_with_its_gradients_and_optimizer_state(stages, double):
    torch.manual_seed(1)
    plain = Net()
    torch.manual_seed(1)
    options = {"device_memory": "1GiB", "num_slabs": 2, "stages_on_device": stages}
    model = hw.compile(Net(), hw.backend("CSX", **options))
    wanted = trained(plain)
    with double:
        optimizer = trained(model)
    with fake_cuda():
        model.calls = model.calls.to(META)
        hw.release(model)
    given = tensors_of(model, optimizer)
    assert on_gpu(given) == []
    assert {param.device for param in model.parameters()} == {CPU}
    assert_equal(given, tensors_of(plain, wanted))
    # The double checks at its end that no page-locked memory is left, and gradients may be in it.
    model.zero_grad()


def on_gpu(tensors):
    return [name for name, tensor in tensors.items() if isinstance(tensor, OnFakeCuda)]


def test_a_parameter_whose_shape_changes_before_the_release_is_in_host_memory(double, monkeypatch):
    """Its former values were a placeholder on the GPU, but the new ones are not there."""
    torch.manual_seed(1)
    plain = Net()
    wanted = trained(plain)
    torch.manual_seed(1)
    model = hw.compile(Net(), hw.backend("CSX", device_memory="1GiB", num_slabs=2))
    with double:
        optimizer = trained(model)
    make_plain = StageParameters.make_plain

    def make_plain_on_gpu(stage, index):
        param = make_plain(stage, index)
        param.__class__ = OnGpu
        return param

    monkeypatch.setattr(StageParameters, "make_plain", make_plain_on_gpu)
    changed, other = list(model.parameters())[:2]
    for param in (changed, next(iter(plain.parameters()))):
        with fake_cuda():
            param.data = torch.cat([param.data, torch.ones_like(param.data)])
    assert on_gpu(optimizer.state[changed]) == []
    with fake_cuda():
        # As if the new values were on the GPU.
        optimizer.state[changed]["exp_avg"] = optimizer.state[changed]["exp_avg"].to(META)
        hw.release(model)
    given = tensors_of(model, optimizer)
    assert on_gpu(given) == [] and other.device == CPU
    assert_equal(given, tensors_of(plain, wanted))
    model.zero_grad()


def test_the_state_of_a_former_optimizer_is_in_host_memory(double, monkeypatch):
    model = hw.compile(Net(), hw.backend("CSX", device_memory="1GiB", num_slabs=2))
    with double:
        former = trained(model)
        with fake_cuda(), monkeypatch.context() as patch:
            patch.setattr(ParameterAtRest, "device", META, raising=False)
            streamed(model).optimizers.update_with(adamw(model.parameters()))
        states = {name: former.state[param] for name, param in model.named_parameters()}
    assert all(states.values()) and all(on_gpu(state) == [] for state in states.values())
    hw.release(model)
    model.zero_grad()


def tensors_of(model, optimizer):
    tensors = dict(model.named_buffers())
    for name, param in model.named_parameters():
        tensors[name] = param.data
        tensors[f"{name}.grad"] = param.grad
        state = optimizer.state[param]
        tensors |= {f"{name}.{key}": value for key, value in state.items()}
    return tensors
