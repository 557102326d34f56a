"""The ranks of the run to which this process belongs, and a context in which it acts as a single rank."""

from __future__ import annotations

import atexit
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch.distributed

from headwater.core.errors import StreamError
from headwater.core.process_value import ProcessValue
from headwater.fabric.fabric import ALONE, Fabric

joined = ProcessValue[Fabric](ALONE)
"""The ranks of this run, or of a run with one rank before the first call of `cluster.join`. Global."""
_alone_in: ContextVar[str | None] = ContextVar("_alone_in", default=None)


@atexit.register
def _leave() -> None:
    """Close connections and process group, whose threads would otherwise crash this process at its exit."""
    joined.value.close()
    if joined.value is not ALONE and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def current() -> Fabric:
    """Return the ranks that act together now: all ranks of the run, or inside `alone` only this rank."""
    return ALONE if _alone_in.get() is not None else joined.value


def require_all_ranks(what: str) -> None:
    """Raise if this rank is inside `alone`, where an operation that needs all ranks is impossible.

    Args:
        what: the thing that is divided among the ranks.

    Raises:
        StreamError: if this rank is inside `alone`.
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
    """Enter a context in which this rank acts as a single rank, for work that no other rank does.

    `torch.distributed` sees no process group either: a metric that computes its value here must not wait for
    the other ranks.

    Args:
        place: name of the code that runs inside, for errors.
    """
    if current() is ALONE:
        yield
        return
    token, group = _alone_in.set(place), torch.distributed.GroupMember.WORLD
    # Every function of `torch.distributed` finds the process group in this attribute.
    torch.distributed.GroupMember.WORLD = None
    try:
        yield
    finally:
        torch.distributed.GroupMember.WORLD = group
        _alone_in.reset(token)
