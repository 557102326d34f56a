"""A GPU that is missing, old, full, shared or broken: errors with a remedy, and steps without a trace."""

import dataclasses
import itertools
import logging
import types

import pytest
import torch
from harness import SEED, History, Setting, assert_equal, collect, make_plan, regression, train_plain
from tests.device_double import CopyStream, DeviceDouble, stand_in_for_cuda
from torch import nn

from headwater.core.buffers import aligned_empty
from headwater.core.errors import PlanError, StreamError
from headwater.core.precision import Precision, usable_precision
from headwater.core.units import GIB, MIB
from headwater.core.warn_once import warn_once
from headwater.plan.machine import free_resources
from headwater.plan.types import Resources
from headwater.store.snapshot import Snapshot
from headwater.store.snapshot_load import SavedCheckpoint
from headwater.stream.cuda import CudaDevice
from headwater.stream.engine import Engine


@pytest.fixture
def gpu(monkeypatch):
    """A CUDA device whose memory is host memory, with 4 of 24 GiB free."""
    device = CudaDevice.__new__(CudaDevice)
    device.torch_device = torch.device("cpu")
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device=None: (4 * GIB, 24 * GIB))
    return device


def test_without_a_gpu_the_remedy_is_the_cpu():
    with pytest.raises(PlanError, match="no CUDA device") as caught:
        CudaDevice()
    assert "use device cpu" in str(caught.value)


def test_a_gpu_without_bf16_computes_in_fp32_and_the_log_says_so(monkeypatch, caplog):
    warn_once.cache_clear()
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation: False)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "Tesla T4")
    with caplog.at_level(logging.WARNING):
        found = [usable_precision(Precision("bf16"), "cuda") for _ in range(3)]
    assert found == [Precision("fp32")] * 3
    (record,) = caplog.records
    assert "Tesla T4 cannot compute in bf16" in record.message and "fp16_type: float16" in record.message
    assert usable_precision(Precision("fp16", 8.0), "cuda") == Precision("fp16", 8.0)
    assert usable_precision(Precision("bf16"), "cpu") == Precision("bf16")


def test_a_second_run_plans_with_the_memory_that_the_first_has_left(gpu):
    free = free_resources(Resources(host_memory=GIB), "cuda")
    assert free.device_memory == 4 * GIB - 384 * MIB


def test_memory_that_the_allocator_keeps_after_an_engine_was_closed_is_free(gpu, monkeypatch):
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda device: 19 * GIB)
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda device: 3 * GIB)
    free = free_resources(Resources(host_memory=GIB), "cuda")
    assert free.device_memory == int(0.94 * (4 + 16) * GIB)


def test_memory_that_another_process_has_taken_since_the_plan_is_named(gpu, monkeypatch):
    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 5.00 GiB")

    monkeypatch.setattr("torch.empty", full)
    with pytest.raises(PlanError, match=r"needs 5.00 GiB more .* has 4.00 GiB of 24.0 GiB free") as caught:
        gpu.allocate_slab(5 * GIB)
    assert "end other processes" in str(caught.value)


def test_page_locking_that_the_system_refuses_locks_nothing(gpu, monkeypatch):
    codes, locked = iter([0, 0, 2]), []

    def register(address, num_bytes, flags):
        code = next(codes)
        locked.extend([address] if not code else [])
        return code

    cudart = types.SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=locked.remove)
    monkeypatch.setattr("torch.cuda.cudart", lambda: cudart)
    memory = [aligned_empty(4096) for _ in range(3)]
    with pytest.raises(StreamError, match=r"4.00 KiB of host memory cannot be page-locked \(CUDA error 2\)"):
        gpu.page_lock(memory)
    assert locked == []


def mlp():
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.LayerNorm(16))))


JOB = regression(mlp, 8, 16)


@pytest.fixture
def double(monkeypatch):
    device = DeviceDouble()
    stand_in_for_cuda(device, monkeypatch)
    with device:
        yield device


def engine_on_double(job, folder):
    model = job.model()
    plan = dataclasses.replace(make_plan(job, model, Setting(), folder), device="cuda")
    return Engine(model, plan, job.optimizer, seed=SEED, loss_function=job.loss)


@pytest.mark.parametrize("call", [1, 6, 14, 22])
def test_a_driver_error_leaves_no_trace_and_the_checkpoint_is_whole(call, double, monkeypatch, tmp_path):
    copy, calls = CopyStream.copy, itertools.count(1)

    def broken(self, target, source):
        if next(calls) >= call:
            double.drain()  # a failed driver runs no copies any more, so none may be left
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nadvice")
        copy(self, target, source)

    with engine_on_double(JOB, tmp_path) as engine:
        engine.train_step(JOB.batches(0), JOB.update(0))
        with monkeypatch.context() as patch:
            patch.setattr(CopyStream, "copy", broken)
            with pytest.raises(StreamError, match="driver has failed: CUDA error: an illegal memory access"):
                engine.train_step(JOB.batches(1), JOB.update(1))
            path = Snapshot(engine.store, tmp_path / "checkpoint", 1).run()
    with engine_on_double(JOB, tmp_path) as resumed:
        SavedCheckpoint(path).restore(resumed.store)
        report = resumed.train_step(JOB.batches(1), JOB.update(1))
        history = collect(resumed, History([report.loss], [report.gradient_norm]))
    wanted = train_plain(JOB, steps=2)
    wanted.losses, wanted.norms = wanted.losses[1:], wanted.norms[1:]
    assert_equal(history, wanted)
    double.end()


def test_a_step_without_memory_leaves_no_trace(double, tmp_path):
    failures = iter([False, True])  # the first call is the dry run

    def loss(model, x):
        value = JOB.loss(model, x)
        if next(failures, False):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return value

    with engine_on_double(dataclasses.replace(JOB, loss=loss), tmp_path) as engine:
        with pytest.raises(StreamError, match="no memory left for this step: CUDA out of memory") as caught:
            engine.train_step(JOB.batches(0), JOB.update(0))
        assert "end other processes" in str(caught.value)
        report = engine.train_step(JOB.batches(0), JOB.update(0))
        history = collect(engine, History([report.loss], [report.gradient_norm]))
    assert_equal(history, train_plain(JOB, steps=1))
