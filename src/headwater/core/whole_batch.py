"""Values of the whole batch for a loss, while each of several ranks computes a part of the batch.

[Note: the whole batch]
A loss that is not a mean over samples needs more than its rank's part: a sum over all samples, or all samples
to choose from. It calls `total` and `rows` for that, in the same order on every rank. With one rank, and in
evaluation, the part is the whole batch. The losses of the ranks are averaged, and so are their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

Gather = Callable[[Tensor], list[Tensor]]
"""Function that gathers a tensor from each rank, in rank order. All have the same shape and dtype."""

_gather: ContextVar[tuple[Gather, int] | None] = ContextVar("_gather", default=None)


@contextmanager
def part_of_batch(gather: Gather, rank: int) -> Iterator[None]:
    """Enter a context in which this rank computes one part of the batch.

    Args:
        gather: collects a tensor of every rank.
        rank: number of this rank.
    """
    token = _gather.set((gather, rank))
    try:
        yield
    finally:
        _gather.reset(token)


def total(own: Tensor) -> Tensor:
    """Return the sum of all ranks' tensors, detached. It has the same bits on all ranks."""
    asked = _gather.get()
    own = own.detach()
    # In the order of ranks, so that the sum has the same bits on all of them.
    return own if asked is None else torch.stack(asked[0](own)).sum(0)


def rows(own: Tensor) -> Tensor:
    """Return the rows of all ranks in rank order: [samples of a part, …] -> [samples, …].

    A loss computed from them is the same on all ranks. A rank receives only the gradient of the rows that it
    has passed in, multiplied by the number of ranks. So the mean over ranks is the whole gradient.
    """
    asked = _gather.get()
    if asked is None:
        return own
    gather, rank = asked
    parts = gather(own.detach())
    count = len(parts)
    parts[rank] = own + (own - own.detach()) * (count - 1)  # its value is that of `own`, exactly
    return torch.cat(parts)
