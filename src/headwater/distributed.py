"""The number of processes and compute ranks of a run, and this process's share of the data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch.distributed
from torch.utils.data import get_worker_info

from headwater.api.ranks import take_part, whole
from headwater.core.errors import ConfigError
from headwater.fabric.cluster import is_rank
from headwater.fabric.launch.cores import check_cores, num_cores

__all__ = [
    "check_num_csx",
    "get_ordinal",
    "is_streamer",
    "num_available",
    "num_tasks",
    "reading_input",
    "take_part",
    "task_id",
    "whole",
]

_reading: ContextVar[bool] = ContextVar("_reading", default=False)


def num_tasks() -> int:
    """Return the number of processes that each read a share of the data; 1 without `torch.distributed`."""
    return torch.distributed.get_world_size() if _is_distributed() else 1


def task_id() -> int:
    """Return the index of this process among those that read data, from 0 to `num_tasks() - 1`."""
    return torch.distributed.get_rank() if _is_distributed() else 0


def get_ordinal() -> int:
    """Return the index of this process in its run: `task_id()`, because every process reads data."""
    return task_id()


def is_streamer() -> bool:
    """True inside the input function of a loader, and inside a worker process of a torch `DataLoader`."""
    return _reading.get() or get_worker_info() is not None


def num_available() -> int:
    """Return the largest number of CSXs (compute ranks) of a run on this machine: one for each CPU core."""
    return num_cores()


def check_num_csx(num_csx: int, *, where: str) -> None:
    """Check that `num_csx` is an integer >= 1, and that this machine has a core for each rank.

    Raises:
        ConfigError: otherwise, with `where` as the place.
    """
    if type(num_csx) is not int or num_csx < 1:
        raise ConfigError(
            f"expected num_csx to be an integer >= 1, got {num_csx!r}",
            where=where,
            remedy="write num_csx=1, or a larger number to start several ranks",
        )
    if not is_rank():  # a started rank may have others on other machines, whose cores are not counted here
        check_cores(num_csx, where=where)


@contextmanager
def reading_input() -> Iterator[None]:
    """Make `is_streamer` return true inside the context."""
    token = _reading.set(True)
    try:
        yield
    finally:
        _reading.reset(token)


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
