"""The ranks that this process belongs to, and code for which there is but one."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch.distributed

from headwater.fabric import slurm
from headwater.fabric.cluster import join_ranks
from headwater.fabric.fabric import ALONE, DEFAULT_TIMEOUT_S, Fabric
from headwater.fabric.parent import end_with_parent
from headwater.fabric.report import ERROR_FILE

_joined: Fabric = ALONE
_is_alone: ContextVar[bool] = ContextVar("_is_alone", default=False)


def is_rank() -> bool:
    """Whether a launcher, `torchrun` or `srun`, has started this process as one rank of several."""
    if slurm.is_task(os.environ):
        os.environ.update(slurm.as_rank(os.environ))
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def is_watched() -> bool:
    """Whether a launcher waits for this process, which may be alone."""
    return is_rank() or ERROR_FILE in os.environ


def join(timeout_s: float = DEFAULT_TIMEOUT_S, num_memx: int = 0) -> Fabric:
    """The ranks of this run, of which this process is one.

    Args:
        timeout_s: how long another rank may keep this one waiting.
        num_memx: how many of the ranks, the last ones, are store ranks.
    """
    global _joined
    if is_watched():
        end_with_parent()
    if _joined is ALONE and is_rank():
        _joined = join_ranks(timeout_s, num_memx)
    return _joined


@atexit.register
def _leave() -> None:
    """End the threads of the process group, or they end this process badly."""
    _joined.close()
    if _joined is not ALONE and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def current() -> Fabric:
    """The ranks that make the calls which come now: those that were joined, or this one."""
    return ALONE if is_alone() else _joined


def is_alone() -> bool:
    """Whether this rank does something now that the others do not."""
    return _is_alone.get()


@contextmanager
def alone() -> Iterator[None]:
    """Within it this rank does something that the others do not: there is nobody else.

    For `torch.distributed` neither: a metric that is asked for its value must not wait for other ranks.
    """
    if current() is ALONE:
        yield
        return
    token, group = _is_alone.set(True), torch.distributed.GroupMember.WORLD
    torch.distributed.GroupMember.WORLD = None
    try:
        yield
    finally:
        torch.distributed.GroupMember.WORLD = group
        _is_alone.reset(token)
