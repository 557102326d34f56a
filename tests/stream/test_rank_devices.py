"""Ranks with one device each, which cannot read host memory, compute the bits of ranks on the CPU."""

import dataclasses
import functools
import os

import pytest
from harness import FP32
from rank_training import Net, plan_of, train
from test_several_hosts import Choosing
from tests.device_double import DeviceDouble
from tests.rank_processes import run_ranks

from headwater.api.ranks import take_accelerator
from headwater.core.buffers import aligned_empty
from headwater.core.errors import ConfigError
from headwater.core.precision import Precision, autocast
from headwater.plan.types import Activations
from headwater.stream.devices import make_device

BF16 = Precision("bf16")


class Beside(DeviceDouble):
    """A stand-in for an accelerator: it has separate memory, and copies to that are late."""

    made = None  # the one of this rank's process

    def __init__(self):
        super().__init__(os.getpid())
        Beside.made = self


@pytest.fixture
def stand_ins(monkeypatch):
    """Replace accelerators by stand-ins."""
    make = {"cpu": make_device, "cuda": lambda name: Beside()}
    engine = "headwater.stream.engine"
    monkeypatch.setattr(f"{engine}.make_device", lambda name: make[name](name))
    monkeypatch.setattr(
        "headwater.stream.micro_batch.autocast", lambda precision, device: autocast(precision, "cpu")
    )


@pytest.mark.parametrize(
    ("ranks", "hosts", "num_memx", "precision", "micro_batches", "net", "on_disk", "policy"),
    [
        (2, 1, 0, FP32, 1, Net, (), Activations.KEEP),
        (2, 1, 0, BF16, 2, Choosing, (), Activations.RECOMPUTE),
        (2, 1, 0, BF16, 1, Net, ("tier",), Activations.KEEP),
        (2, 1, 0, FP32, 2, Choosing, ("tier", "gradient_tier"), Activations.RECOMPUTE),
        (4, 2, 0, BF16, 1, Net, ("tier",), Activations.KEEP),
        (4, 2, 0, FP32, 1, Choosing, ("gradient_tier",), Activations.KEEP),
        (3, 1, 1, FP32, 1, Net, (), Activations.KEEP),
        (3, 1, 1, BF16, 2, Net, ("tier",), Activations.KEEP),
        (4, 2, 2, FP32, 1, Net, ("tier", "gradient_tier"), Activations.KEEP),
    ],
)
def test_ranks_with_one_device_each_equal_ranks_on_the_cpu(
    ranks, hosts, num_memx, precision, micro_batches, net, on_disk, policy, stand_ins, tmp_path
):
    memory = plan_of(precision, micro_batches, net)
    policies = tuple(
        policy if stage.name.startswith("blocks") else Activations.KEEP for stage in memory.trace.stages
    )
    here = dict.fromkeys(on_disk, "disk") | {"disk": tmp_path, "activations": policies}
    beside = dataclasses.replace(memory, device="cuda", in_place=False, slabs=4, **here)
    work = functools.partial(train, micro_batches=micro_batches, net=net, read=trained)
    wanted = run_ranks(functools.partial(work, plan=memory), ranks, hosts, num_memx)
    found = run_ranks(functools.partial(work, plan=beside, verify_disk=True), ranks, hosts, num_memx)
    for (told, weights), (other_told, other_weights) in zip(found, wanted, strict=True):
        assert told == other_told
        assert weights.keys() == other_weights.keys()
        for name, value in weights.items():
            assert (value == other_weights[name]).all(), name
    assert sum(bool(weights) for _, weights in found) == ranks - num_memx


def trained(engine):
    """Return all weights as this rank reads them; none on ranks that do not compute."""
    engine.store.flush()
    if engine.plan.device != "cpu":
        classes = {stage.slab_bytes for stage in engine.store.stages}
        assert (Beside.made is not None) == engine.fabric.computes
        if Beside.made is not None:
            assert Beside.made.slabs >= len(classes)
            assert Beside.made.races == []
    weights = []
    for stage in engine.store.stages if engine.fabric.computes else ():
        image = aligned_empty(engine.store.tier.layouts[stage.index].wire_bytes)
        engine.store.fetch(stage.index, image)
        names = [spec.name for spec in stage.params]
        weights += [(name, value.clone()) for name, value in zip(names, stage.views(image), strict=True)]
    return weights


@pytest.mark.parametrize(("there", "ranks", "num_memx"), [(1, 2, 0), (2, 3, 0), (2, 3, 1), (3, 3, 0)])
def test_more_ranks_than_accelerators_are_refused(there, ranks, num_memx, monkeypatch):
    def uuid(device):
        return type("Properties", (), {"uuid": f"GPU-{device.index}"})

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: there)
    monkeypatch.setattr("torch.cuda.get_device_properties", uuid)

    def taken(fabric):
        """Take an accelerator for the rank; return the device number or the error."""
        told = []
        monkeypatch.setattr("torch.cuda.set_device", lambda device: told.append(device.index))
        try:
            take_accelerator("cuda", fabric, where="num_csx")
        except ConfigError as error:
            told.append(str(error))
        return told

    found, num_csx = run_ranks(taken, ranks, num_memx=num_memx), ranks - num_memx
    if num_csx > there:
        assert all(f"(accelerators), got {num_csx}" in text for (text,) in found)
    else:
        assert found == [[rank] for rank in range(num_csx)] + [[]] * num_memx
