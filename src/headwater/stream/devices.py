"""Choice of the compute device by its name."""

from __future__ import annotations

from headwater.core.errors import PlanError
from headwater.stream.cuda import CudaDevice
from headwater.stream.device import CpuDevice, Device


def make_device(name: str) -> Device:
    """Return the device called `cpu` or `cuda`.

    Raises:
        PlanError: for another name, or if torch finds no CUDA device.
    """
    if name == "cpu":
        return CpuDevice()
    if name == "cuda":
        return CudaDevice()
    raise PlanError(f"expected device cpu or cuda, got {name!r}", remedy="write cpu or cuda")
