"""The ranks that this process belongs to, and a context in which it acts as a single rank."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch.distributed

from headwater.core.errors import StreamError
from headwater.core.process_value import ProcessValue
from headwater.fabric import slurm
from headwater.fabric.cluster import join_ranks
from headwater.fabric.fabric import ALONE, DEFAULT_TIMEOUT_S, Fabric
from headwater.fabric.parent import end_with_parent
from headwater.fabric.report import ERROR_FILE

_joined = ProcessValue[Fabric](ALONE)
"""The ranks of this run. Shared by the process: it is one of them from the first call that joins them."""
_alone_in: ContextVar[str | None] = ContextVar("_alone_in", default=None)


def is_rank() -> bool:
    """True if a launcher, `torchrun` or `srun`, has started this process as one rank of several."""
    if slurm.is_task(os.environ):
        os.environ.update(slurm.as_rank(os.environ))
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def is_watched() -> bool:
    """True if a launcher waits for this process, which may be its only rank."""
    return is_rank() or ERROR_FILE in os.environ


def join(timeout_s: float = DEFAULT_TIMEOUT_S, num_memx: int = 0) -> Fabric:
    """Return the ranks of this run. The first call is a rendezvous with them.

    Args:
        timeout_s: seconds to wait for another rank before an error is raised.
        num_memx: number of store ranks. They are the last ranks.

    Raises:
        ConfigError: if all ranks would be store ranks.
        RankError: if ranks cannot be reached, or the ranks of a host are not numbered consecutively.
    """
    if is_watched():
        end_with_parent()
    # Once: a second rendezvous would wait for ranks that have left the first.
    if _joined.value is ALONE and is_rank():
        _joined.value = join_ranks(timeout_s, num_memx)
    return _joined.value


@atexit.register
def _leave() -> None:
    """Close connections and process group, whose threads would otherwise crash this process at its exit."""
    _joined.value.close()
    if _joined.value is not ALONE and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def current() -> Fabric:
    """Return the ranks that make the current calls: all that were joined, or inside `alone` this rank."""
    return ALONE if _alone_in.get() is not None else _joined.value


def require_all_ranks(what: str) -> None:
    """Check that all ranks make this call: that this rank is not inside `alone`.

    Args:
        what: the thing that is divided among the ranks.

    Raises:
        StreamError: if it is.
    """
    place = _alone_in.get()
    if place is not None:
        raise StreamError(
            f"{what} is requested on one rank, but each rank holds only a part of it",
            where=place,
            remedy="request it on all ranks: in the loop, or in a checkpoint_closure",
        )


@contextmanager
def alone(place: str) -> Iterator[None]:
    """Inside the context this rank acts as a single rank, for work that no other rank does.

    `torch.distributed` sees no process group either: a metric that computes its value here must not wait for
    the other ranks.

    Args:
        place: name of the code that runs inside, for errors.
    """
    if current() is ALONE:
        yield
        return
    token, group = _alone_in.set(place), torch.distributed.GroupMember.WORLD
    # The attribute that every function of `torch.distributed` looks at.
    torch.distributed.GroupMember.WORLD = None
    try:
        yield
    finally:
        torch.distributed.GroupMember.WORLD = group
        _alone_in.reset(token)
