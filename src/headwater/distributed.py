"""How many processes and compute ranks take part, and which share of the data each has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch.distributed
from torch.utils.data import get_worker_info

from headwater.api.ranks import take_part, whole
from headwater.core.errors import ConfigError
from headwater.fabric.cores import check_cores, num_cores
from headwater.fabric.membership import is_rank

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
    """How many processes read the data of this run: each its own share. 1 without `torch.distributed`."""
    return torch.distributed.get_world_size() if _is_distributed() else 1


def task_id() -> int:
    """Which of them this process is, from 0 to `num_tasks() - 1`."""
    return torch.distributed.get_rank() if _is_distributed() else 0


def get_ordinal() -> int:
    """The number of this process in its run: the same as `task_id`, for every process here reads data."""
    return task_id()


def is_streamer() -> bool:
    """Whether this code reads data: in the input function of a loader, or in a worker process of torch's."""
    return _reading.get() or get_worker_info() is not None


def num_available() -> int:
    """How many CSXs (compute ranks with their device) a run can have on this machine: one for each core."""
    return num_cores()


def check_num_csx(num_csx: int, *, where: str) -> None:
    """Raise `ConfigError` unless that many compute ranks are there."""
    if type(num_csx) is not int or num_csx < 1:
        raise ConfigError(f"num_csx is a whole number from 1, found {num_csx!r}", where=where)
    if not is_rank():  # otherwise some of them may be on other machines
        check_cores(num_csx, where=where)


@contextmanager
def reading_input() -> Iterator[None]:
    """Marks what runs within it as reading data."""
    token = _reading.set(True)
    try:
        yield
    finally:
        _reading.reset(token)


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
