"""A device tier whose device is the CPU, for tests of the store alone."""

from collections.abc import Sequence

from headwater.core.buffers import aligned_empty
from headwater.core.streams import IMMEDIATE
from headwater.store.device import DeviceMemory, DeviceTier
from headwater.store.layout import StageLayout


def device_tier(layouts: Sequence[StageLayout]) -> DeviceTier:
    """Return a device tier in host memory."""
    return DeviceTier(layouts, DeviceMemory(aligned_empty, IMMEDIATE, lambda: IMMEDIATE))
