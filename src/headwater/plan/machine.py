"""Memory that this process holds, and memory that the machine and its limits leave free.

[Note: one measure of host memory] A plan and a run count the same bytes: the resident memory of this process,
including pages of library files, and the private memory of its data workers. `held_bytes` measures it. A plan
starts from `resident_bytes` after the dry run, which loads most of what a run loads, and adds `LATE_BYTES`
for memory that is needed later.
"""

from __future__ import annotations

import logging
import os
import resource
import shutil
import time
from collections.abc import Iterator
from functools import lru_cache
from math import ceil
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
from torch import nn

from headwater.core.gpu import first_use
from headwater.core.module_parameters import parameters_of
from headwater.core.owned_memory import ONLY_OWNER, private_resident_bytes, storage_references
from headwater.core.units import MIB, format_bytes
from headwater.core.warn_once import warn_once
from headwater.plan.alive import has_storage
from headwater.plan.cgroups import Level, memory_levels, memory_room
from headwater.plan.types import Resources

logger = logging.getLogger(__name__)

FREE_SHARE = 0.9
"""Share of the free memory or disk that a plan uses if the user sets no budget."""

_FREE_SHARE_OF_GPU = 0.94
"""The same for a GPU. The rest is for libraries and their scratch memory."""

_LIBRARY_BYTES = 384 * MIB
"""Least device memory that a plan leaves to libraries if the user sets no budget. Two threads start products,
and each has up to 32 MiB of workspace for cuBLAS and 32 MiB for cuBLASLt. CUDA also loads kernels into device
memory when they are first used."""

LATE_BYTES = 48 * MIB
"""Host memory that a run takes after its plan is made, without weights and activations: pages of kernels, the
logs, threads, readers of data, pictures. It was measured: see docs/benchmarks.md."""

WORKER_BYTES = 160 * MIB
"""Host memory that a data worker does not share: objects of `import torch`, and its batches."""


def resident_bytes() -> int:
    """Return the bytes of host memory that this process occupies."""
    return int(psutil.Process().memory_info().rss)


def held_bytes() -> int:
    """Return the bytes of host memory that this process and its data workers occupy."""
    return resident_bytes() + sum(map(_own_bytes, _children(os.getpid(), int(time.monotonic()))))


@lru_cache(maxsize=1)
def _children(process: int, second: int) -> list[psutil.Process]:
    """Return the children of a process. Calls with the same `second` of the clock return a cached list.

    A run asks after every step, and for each answer psutil reads the states of all processes of the machine.
    """
    return psutil.Process(process).children()


def _own_bytes(process: psutil.Process) -> int:
    """Return the private bytes of a process: those that are not pages of files."""
    try:
        memory = process.memory_info()
    except psutil.Error:  # the process has ended
        return 0
    return int(memory.rss - getattr(memory, "shared", 0))  # `shared` exists on Linux only


def weight_bytes(model: nn.Module) -> int:
    """Return the resident bytes of the weights of a model that become free when a store takes them over.

    Weights that other tensors share do not count, since their memory stays. Neither do weights in files.
    """
    return private_resident_bytes(_memory_of_weights(model))


def _memory_of_weights(model: nn.Module) -> Iterator[tuple[int, int]]:
    """Yield address and size of the memory of each parameter that nothing else uses."""
    for param in parameters_of(model):
        is_plain = type(param) is nn.Parameter and param.device.type == "cpu" and has_storage(param)
        if is_plain and storage_references(param) == ONLY_OWNER:
            storage = param.untyped_storage()
            yield storage.data_ptr(), storage.nbytes()


def free_resources(resources: Resources, device: str) -> Resources:
    """Return `resources` with every budget that is not set replaced by what the machine has free.

    A budget of host memory above the limit of a control group is lowered to that of the group, since the
    kernel would end a run that exceeds it.
    """
    host, gpu, disk = resources.host_memory, resources.device_memory, resources.disk_bytes
    host = free_host_budget() if host is None else min(host, group_memory().budget or host)
    if gpu is None and device != "cpu":
        gpu = device_budget(free_device_bytes(device))
    if disk is None and resources.disk is not None:
        disk = int(FREE_SHARE * shutil.disk_usage(existing_ancestor(resources.disk)).free)
    return Resources(device_memory=gpu, host_memory=host, disk=resources.disk, disk_bytes=disk)


def warn_of_budgets(budget: Resources, device: str) -> None:
    """Log a warning, once, for each budget that cannot limit a run with this device on this machine."""
    limits = [("host_memory", budget.host_memory, psutil.virtual_memory().total, "this machine")]
    if device != "cpu" and budget.device_memory is not None:
        total = torch.cuda.mem_get_info(device)[1]
        limits.append(("device_memory", budget.device_memory, total, "the GPU"))
    notes = [
        f"{name} is {format_bytes(limit)}, but {owner} has {format_bytes(total)}: "
        "a run that needs more than that fails here"
        for name, limit, total, owner in limits
        if limit is not None and limit > total
    ]
    if device == "cpu" and budget.device_memory is not None:
        notes.append("device_memory: without effect, because the CPU computes; host_memory limits the run")
    for note in notes:
        warn_once(logger, "%s", note)


def free_device_bytes(device: str) -> int:
    """Return the bytes of device memory that this process can still take.

    They include what torch's allocator keeps of freed tensors, such as those of an engine that was closed.

    Raises:
        PlanError: if the driver refuses this process.
    """
    with first_use():
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0] + kept)


def device_budget(free: int) -> int:
    """Return the bytes that a plan uses of a device with `free` free bytes if the user sets no budget."""
    return max(0, min(int(_FREE_SHARE_OF_GPU * free), free - _LIBRARY_BYTES))


def free_host_budget() -> int:
    """Return the bytes of host memory that this process may hold: what it has, and most of what is free.

    In a control group that is at most `FREE_SHARE` of the limit. Pages of library files count here, although
    they may be charged to another group. This errs on the safe side.
    """
    budget = resident_bytes() + int(FREE_SHARE * free_host_bytes())
    return min(budget, group_memory().budget or budget)


class GroupMemory(NamedTuple):
    """The control groups around this process, and the bytes that the process holds.

    Attributes:
        levels: the groups that have a memory limit.
        resident: bytes that this process holds.
    """

    levels: tuple[Level, ...]
    resident: int

    @property
    def budget(self) -> int | None:
        """Bytes that the processes of a run may hold within these groups; `None` without a limit.

        The memory of other processes in a group is subtracted.
        """
        return min((self._within(level.limit, level.used) for level in self.levels), default=None)

    def limit_for(self, num_bytes: int) -> int | None:
        """Return the lowest limit of a group that allows `num_bytes`; `None` if the present limits do."""
        short = [level.used for level in self.levels if self._within(level.limit, level.used) < num_bytes]
        if not short:
            return None
        beside = max(0, num_bytes - self.resident)
        return max(ceil(num_bytes / FREE_SHARE), max(short) + ceil(beside / FREE_SHARE))

    def _within(self, limit: int, used: int) -> int:
        return min(int(FREE_SHARE * limit), self.resident + int(FREE_SHARE * max(0, limit - used)))


NO_GROUP = GroupMemory((), 0)
"""A process outside of control groups that limit memory."""


def group_memory() -> GroupMemory:
    """Return the control groups around this process, and the memory that it holds."""
    return GroupMemory(tuple(memory_levels()), resident_bytes())


def free_host_bytes(budget: int | None = None) -> int:
    """Return the bytes of host memory that this process can still take.

    That is the free memory of the machine, or less within a container (control groups) or under a limit of
    the address space (`ulimit -v`).

    Args:
        budget: bytes of host memory that this process may hold, if there is a limit. The result is negative
            if it holds more.
    """
    # The tightest limit counts: memory beyond it ends the process, or makes the system slow.
    left = None if budget is None else budget - resident_bytes()
    rooms = (psutil.virtual_memory().available, memory_room(), _address_room(), left)
    return min(room for room in rooms if room is not None)


def _address_room() -> int | None:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    return max(0, limit - int(psutil.Process().memory_info().vms))


def existing_ancestor(folder: Path) -> Path:
    """Return `folder`, or the nearest folder above it that exists."""
    folder = folder.expanduser().resolve()
    return next(path for path in (folder, *folder.parents) if path.exists())
