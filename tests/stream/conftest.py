"""Fixtures of the tests of the streaming engine."""

import dataclasses
import zlib

import pytest
import torch
from tests.device_double import DeviceDouble, stand_in_for_cuda

from headwater.fabric.fabric import ALONE
from headwater.stream.engine import Engine
from headwater.stream.options import DEFAULTS

pytest.register_assert_rewrite("harness")


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """Use one thread: torch may split a sum differently for another number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _on_device(request, monkeypatch):
    """With the option --on-device, run all engines of a test on a device double."""
    seed = request.config.getoption("--on-device")
    if seed is None or "device" in request.node.path.name:
        yield
        return
    device, make = DeviceDouble(zlib.crc32(f"{seed} {request.node.nodeid}".encode())), Engine.__init__

    def make_on_device(self, model, plan, *args, fabric=ALONE, options=DEFAULTS, **kwargs):
        if fabric.size == 1 and not options.compile_blocks:
            plan = dataclasses.replace(plan, device="cuda", in_place=False)
        make(self, model, plan, *args, fabric=fabric, options=options, **kwargs)

    stand_in_for_cuda(device, monkeypatch)
    monkeypatch.setattr(Engine, "__init__", make_on_device)
    with device:
        yield
    device.end(unlocked=False)
