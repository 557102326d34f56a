"""Errors and warnings about a GPU that torch cannot use have the reason."""

import logging

import pytest
import torch

import headwater as hw
from headwater.core import gpu
from headwater.core.errors import ConfigError, PlanError
from headwater.core.gpu import first_use, why_missing, why_unused
from headwater.core.warn_once import warn_once
from headwater.plan.machine import free_device_bytes
from headwater.plan.options import device_of
from headwater.stream.cuda import CudaDevice

TOO_OLD = (
    "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver by "
    "downloading and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx"
)


@pytest.fixture
def old_driver(monkeypatch, tmp_path):
    """A machine with a GPU whose driver is too old for torch."""

    def init():
        raise RuntimeError(TOO_OLD)

    monkeypatch.setattr("torch.cuda.init", init)
    monkeypatch.setattr(gpu, "_DRIVER", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    warn_once.cache_clear()


def test_the_reason_is_the_first_sentence_of_torch(old_driver):
    assert why_missing() == "The NVIDIA driver on your system is too old (found version 11040)"


def test_the_error_of_cuda_is_part_of_the_reason(monkeypatch):
    def init():
        raise RuntimeError(
            "Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling "
            "NumCudaDevices() that might have already set an error? Error 802: system not yet initialized"
        )

    monkeypatch.setattr("torch.cuda.init", init)
    assert why_missing() == (
        "Unexpected error from cudaGetDeviceCount(): Error 802: system not yet initialized"
    )


def test_a_run_on_the_cpu_beside_a_gpu_with_an_old_driver_gives_one_warning(old_driver, caplog):
    config = hw.backend("CSX").config
    with caplog.at_level(logging.WARNING):
        assert [device_of(config) for _ in range(2)] == ["cpu", "cpu"]
    assert caplog.messages == [
        "the CPU computes, because torch cannot use the GPU of this machine: "
        "The NVIDIA driver on your system is too old (found version 11040)"
    ]
    assert device_of(hw.backend("CPU").config) == "cpu" and len(caplog.messages) == 1


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_a_user_who_hides_the_gpu_gets_no_warning(hidden, old_driver, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert why_unused() is None


def test_a_machine_without_a_gpu_gives_no_warning(old_driver, monkeypatch, tmp_path):
    monkeypatch.setattr(gpu, "_DRIVER", tmp_path / "missing")
    assert why_unused() is None


def test_the_errors_without_a_gpu_have_the_reason(old_driver):
    with pytest.raises(PlanError, match=r"torch finds no CUDA device: The NVIDIA driver .* is too old"):
        CudaDevice()
    with pytest.raises(ConfigError, match=r"torch finds no GPU: The NVIDIA driver .* is too old"):
        hw.backend("GPU")


def test_a_driver_that_refuses_this_process_is_an_error_of_the_plan(monkeypatch):
    def refuse(device):
        raise torch.AcceleratorError("CUDA error: all CUDA-capable devices are busy or unavailable\nadvice")

    monkeypatch.setattr("torch.cuda.mem_get_info", refuse)
    with pytest.raises(PlanError, match="cannot be used: CUDA error: all CUDA-capable devices are") as caught:
        free_device_bytes("cuda")
    assert "nvidia-smi" in caught.value.remedy and "advice" not in str(caught.value)


def test_an_engine_on_a_full_gpu_is_refused_before_it_allocates(monkeypatch):
    def full(device):
        raise torch.OutOfMemoryError("CUDA out of memory")

    cuda = {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "get_device_name": lambda device: "a GPU",
        "mem_get_info": full,
    }
    for name, function in cuda.items():
        monkeypatch.setattr(f"torch.cuda.{name}", function)
    with pytest.raises(PlanError, match="the GPU cannot be used: CUDA out of memory"):
        CudaDevice()


def test_errors_that_torch_did_not_raise_pass():
    with pytest.raises(KeyError), first_use():
        raise KeyError("name")
