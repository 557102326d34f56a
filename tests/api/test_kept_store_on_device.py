"""On a device with late copies, a larger batch uses the store of the engine before, also in device memory."""

import dataclasses

import pytest
import torch
from any_loop import Net, adamw, assert_equal, batches, loss_of
from tests.device_double import DeviceDouble, stand_in_for_cuda

import headwater as hw
from headwater.api.compile import streamed
from headwater.plan.predict import NOMINAL

RATES = dataclasses.replace(NOMINAL, link_bytes_per_s=1e9, memory_bytes_per_s=1e12)
SIZES = [(2, 2), (5, 3), (4, 9), (11, 1)]
"""Sizes of the micro-batches of each step; some of the larger ones come in the middle of a step."""


@pytest.fixture
def double(device_seed, monkeypatch):
    device = DeviceDouble(device_seed)
    stand_in_for_cuda(device, monkeypatch)
    monkeypatch.setattr("headwater.api.planner.device_of", lambda config: "cuda")
    monkeypatch.setattr("headwater.api.planner.calibrate", lambda *_, **__: RATES)
    monkeypatch.setattr("headwater.api.planner.warn_of_budgets", lambda *_: None)  # they ask CUDA
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # torch may split a sum differently for another number of threads
    yield device
    torch.set_num_threads(threads)
    device.end()


def trained(model):
    optimizer = adamw(model.parameters())
    losses, engines = [], []
    for sizes in SIZES:
        optimizer.zero_grad()
        for size in sizes:
            ((inputs, targets),) = batches(1, size=size, seed=size)
            loss = loss_of(model(inputs), targets)
            loss.backward()
            losses.append(loss.item())
            stream = streamed(model)
            if stream is not None and stream.engine not in engines:
                engines.append(stream.engine)
        optimizer.step()
    return losses, engines


@pytest.mark.same_dry_runs("options", "device_seed")
@pytest.mark.parametrize(
    "options",
    [
        {"num_slabs": 2, "stages_on_device": 0},
        {"stages_on_device": 3},
        {"num_slabs": 3, "stages_on_device": 1, "activations": "offload"},
        {"num_slabs": 2, "stages_on_device": 99, "activations": "recompute"},
    ],
    ids=["in host memory", "some on the device", "offloaded", "all on the device"],
)
def test_larger_batches_on_a_late_device_equal_plain_pytorch(double, options):
    torch.manual_seed(1)
    plain = Net()
    torch.manual_seed(1)
    model = hw.compile(Net(), hw.backend("CSX", device_memory="1GiB", **options))
    torch.manual_seed(2)
    wanted, _ = trained(plain)
    torch.manual_seed(2)
    with double:
        losses, engines = trained(model)
        state = {name: value.clone() for name, value in model.state_dict().items()}
        assert len({engine.store for engine in engines}) == 1 and len(engines) == 4
        store, count = engines[0].store, min(options["stages_on_device"], len(engines[0].store.stages))
        on_device = [store.tier.on_device(stage.index) is not None for stage in store.stages]
        assert sum(on_device) == count == len(engines[-1].plan.on_device)
        hw.release(model)
    assert losses == wanted
    assert_equal(state, plain.state_dict())
