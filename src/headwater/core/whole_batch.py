"""What a model may ask of the whole batch, of which several ranks compute equal parts.

[Note: the whole batch]
A loss that is no mean over samples needs more than its part: a mean over all samples, or all samples to
choose from. It asks for that with `total` and `rows`, alike on every rank. Alone, and in evaluation, a part
is the whole. The losses of the ranks are averaged, and so are their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

Gather = Callable[[Tensor], list[Tensor]]
"""Gives the tensors of all ranks, of one shape and dtype, in their order."""

_gather: ContextVar[tuple[Gather, int] | None] = ContextVar("_gather", default=None)


@contextmanager
def part_of_batch(gather: Gather, rank: int) -> Iterator[None]:
    """Within it this rank computes a part.

    Args:
        gather: asks all ranks.
        rank: which part is this one's.
    """
    token = _gather.set((gather, rank))
    try:
        yield
    finally:
        _gather.reset(token)


def total(own: Tensor) -> Tensor:
    """The sum of what each rank gives, without a gradient; the same bits on all of them."""
    asked = _gather.get()
    own = own.detach()
    return own if asked is None else torch.stack(asked[0](own)).sum(0)


def rows(own: Tensor) -> Tensor:
    """The rows of all ranks, in their order: [samples of a part, …] -> [samples, …].

    A loss made of them is the same on all ranks. Of its gradient each rank has what is its rows', times the
    number of ranks, so that the mean over ranks is the whole gradient.
    """
    asked = _gather.get()
    if asked is None:
        return own
    gather, rank = asked
    parts = gather(own.detach())
    count = len(parts)
    parts[rank] = own + (own - own.detach()) * (count - 1)  # the very values that the others see
    return torch.cat(parts)
