"""What this machine, and whatever confines the process on it, leave free."""

from __future__ import annotations

import resource
import shutil
from pathlib import Path

import psutil
import torch

from headwater.plan.cgroups import memory_room
from headwater.plan.types import Resources

FREE_SHARE = 0.9
"""Share of the free memory or disk that a plan takes where the user sets no budget."""


def resident_bytes() -> int:
    """Bytes of host memory that this process occupies now."""
    return int(psutil.Process().memory_info().rss)


def free_resources(resources: Resources, device: str) -> Resources:
    """`resources` with every budget that was not set filled in from what the machine has free."""
    host, gpu, disk = resources.host_memory, resources.device_memory, resources.disk_bytes
    if host is None:
        host = resident_bytes() + int(FREE_SHARE * free_host_bytes())
    if gpu is None and device != "cpu":
        gpu = int(FREE_SHARE * torch.cuda.mem_get_info(device)[0])
    if disk is None and resources.disk is not None:
        disk = int(FREE_SHARE * shutil.disk_usage(existing_ancestor(resources.disk)).free)
    return Resources(device_memory=gpu, host_memory=host, disk=resources.disk, disk_bytes=disk)


def free_host_bytes() -> int:
    """Bytes of host memory that this process can still take.

    That is what the machine has free, or less: within a container (control groups) or under a limit of its
    address space (`ulimit -v`).
    """
    rooms = (psutil.virtual_memory().available, memory_room(), _address_room())
    return min(room for room in rooms if room is not None)


def _address_room() -> int | None:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    return max(0, limit - int(psutil.Process().memory_info().vms))


def existing_ancestor(folder: Path) -> Path:
    """`folder`, or the nearest folder above it that exists."""
    folder = folder.expanduser().resolve()
    return next(path for path in (folder, *folder.parents) if path.exists())
