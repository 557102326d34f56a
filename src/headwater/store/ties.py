"""Wire values rounded to even: a bit for each master that halves of 16 bits cannot hold.

[Note: ties to even] torch rounds a tie between two bf16 numbers to the even one. So 65,537 masters have the
same even wire value, one too many for a lower half of 16 bits. `Encoding.EVEN` has one bit more for each
element. It is set if the master is a tie and its wire value is the smaller neighbour. The master is then
`((high + 1) << 16) + low` instead of `(high << 16) + low`. These bits are packed in bytes, the lowest first.

In a trained model about one bit in 131,072 is set, in weights that were fp16 about one in 16. So on a CPU
these elements are found first, and only they are changed. A GPU would make the host wait for this list, and
changes all elements instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import torch

from headwater.core.buffers import round_up

_TIE = -0x8000
"""The lower half of a master halfway between two bf16 numbers."""

_CHUNK_ELEMENTS = 1 << 18
"""Elements of one pass on a CPU, whose list of ties has a limited size."""


def tie_flags(numel: int) -> int:
    """Return the number of bytes that a GPU needs for `raise_ties` and `lower_ties`."""
    return round_up(numel, 8)


def raise_ties(master: torch.Tensor, ties: torch.Tensor, flags: torch.Tensor | None = None) -> None:
    """Correct masters that are joined from two halves: add one to the upper half where the bit is set.

    Args:
        master: fp32, 1-D; changed.
        ties: one bit for each master, uint8.
        flags: uint8 memory of `tie_flags` elements; needed on a GPU only.
    """
    if flags is not None:
        raise_ties_at_once(master, ties, flags)
        return
    places = _bits_of_byte(master.device)
    for packed, whole in _chunks(ties, master.view(torch.int32)):
        found = _places_of(packed.numpy() != 0).unsqueeze(1)
        if found.numel():
            is_set = packed[found].bitwise_right_shift(places).bitwise_and_(1).bool()
            whole[(found * 8 + places)[is_set]] += 1 << 16


def raise_ties_at_once(master: torch.Tensor, ties: torch.Tensor, flags: torch.Tensor) -> None:
    """Do the same as `raise_ties` for all elements, without new memory."""
    torch.bitwise_right_shift(ties.unsqueeze(1), _bits_of_byte(ties.device), out=flags.view(-1, 8))
    master.view(torch.int32).add_(flags.bitwise_and_(1)[: master.numel()], alpha=1 << 16)


def lower_ties(
    high: torch.Tensor, low: torch.Tensor, ties: torch.Tensor, flags: torch.Tensor | None = None
) -> None:
    """Correct wire values whose ties were rounded away from zero: make them even, and set their bits.

    Args:
        high: wire values, bf16, 1-D; changed.
        low: lower halves, int16.
        ties: one bit for each element, uint8; overwritten.
        flags: uint8 memory of `tie_flags` elements; needed on a GPU only.
    """
    if flags is not None:
        lower_ties_at_once(high, low, ties, flags)
        return
    for packed, upper, lower in _chunks(ties, high.view(torch.int16), low):
        packed.zero_()
        tied = _places_of(lower.numpy() == _TIE)
        down = tied[upper[tied].bitwise_and_(1) == 1]
        if down.numel():
            upper[down] -= 1
            bits = torch.ones_like(down, dtype=torch.uint8).bitwise_left_shift_(down % 8)
            packed.index_add_(0, down // 8, bits)  # no bit is added twice


def lower_ties_at_once(
    high: torch.Tensor, low: torch.Tensor, ties: torch.Tensor, flags: torch.Tensor
) -> None:
    """Do the same as `lower_ties` for all elements, without new memory."""
    own, upper = flags[: high.numel()], high.view(torch.int16)
    flags[high.numel() :] = 0
    torch.eq(low, _TIE, out=own.view(torch.bool))
    upper.sub_(own.bitwise_and_(upper))  # only the lowest bit of `own` can be set: the odd ones become even
    rows = flags.view(-1, 8).bitwise_left_shift_(_bits_of_byte(flags.device))
    torch.sum(rows, 1, dtype=torch.uint8, out=ties)


def _places_of(found: np.ndarray[Any, np.dtype[np.bool_]]) -> torch.Tensor:
    """Return the places of true elements, which NumPy compares and lists several times as fast as torch."""
    return torch.from_numpy(np.flatnonzero(found))


@cache
def _bits_of_byte(device: torch.device) -> torch.Tensor:
    """Return the numbers of the bits of a byte."""
    return torch.arange(8, dtype=torch.uint8, device=device)


def _chunks(ties: torch.Tensor, *tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield parts of `ties`, each with the elements of the other tensors whose bits it has."""
    elements = (tensor.split(_CHUNK_ELEMENTS) for tensor in tensors)
    return zip(ties.split(_CHUNK_ELEMENTS // 8), *elements, strict=True)
