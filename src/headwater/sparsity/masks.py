"""Masks, which say which elements of a weight are kept. Pure functions of tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

_ONES = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(axis=1, dtype=np.uint8)
"""Number of bits that are set, of each byte."""

_BLOCK = 1 << 16
"""Elements whose bits are counted together."""

INIT_METHODS = ("random", "topk", "from_zeros", "checkerboard")
"""Methods for choosing the first mask; see `first_mask`."""


def first_mask(weight: Tensor, sparsity: float, method: str, generator: torch.Generator) -> Tensor:
    """Return the mask that a weight has at the start of training.

    Args:
        weight: any shape.
        sparsity: fraction of the elements to mask, 0 to 1. `from_zeros` ignores it.
        method: `random` keeps random elements; `topk` keeps those of the largest absolute value; `from_zeros`
            keeps those that are not zero; `checkerboard` spaces the kept elements evenly.
        generator: random generator for `random`.

    Returns:
        A bool tensor of the same shape: true where an element is kept.
    """
    kept = num_kept(weight.numel(), sparsity)
    match method:
        case "random":
            return largest(
                torch.rand(weight.shape, dtype=torch.float32, generator=generator, device="cpu"), kept
            )
        case "topk":
            return largest(weight.abs(), kept)
        case "from_zeros":
            return weight != 0
        case "checkerboard":
            places = torch.arange(weight.numel() + 1, dtype=torch.float64, device="cpu")
            steps = places.mul_(kept / max(weight.numel(), 1)).round_()
            return (steps[1:] > steps[:-1]).view(weight.shape)
    raise AssertionError(f"unknown init_method {method!r}")


def largest(scores: Tensor, count: int) -> Tensor:
    """Return a bool tensor of the shape of `scores`: true at its `count` largest elements.

    If elements are equal, the first ones count as larger. `torch.topk` would need five times as much memory.
    """
    if not count:
        return torch.zeros(scores.shape, dtype=torch.bool, device="cpu")
    # Not in bf16, which numpy does not have; fp32 has the same values.
    flat = scores.detach().reshape(-1)
    values = (flat.float() if flat.dtype.itemsize < 4 else flat).numpy()
    smallest = np.partition(values, len(values) - count)[len(values) - count]
    mask = values > smallest
    missing = count - int(mask.sum())
    for at in range(0, len(values), _BLOCK):  # in blocks, because many elements may be equal
        if not missing:
            break
        equal = np.flatnonzero(values[at : at + _BLOCK] == smallest)[:missing] + at
        mask[equal] = True
        missing -= len(equal)
    return torch.from_numpy(mask).view(scores.shape)


def num_kept(numel: int, sparsity: float) -> int:
    """Return the number of elements kept out of `numel` at a sparsity, which is clamped to 0–1."""
    return numel - round(min(max(sparsity, 0.0), 1.0) * numel)


def exchanged(weight: Tensor, mask: Tensor, scores: Callable[[], Tensor], fraction: float) -> Tensor:
    """Return the mask after an exchange: the smallest kept weights are dropped, and as many others added.

    An element that was just dropped may be added again if its score is high enough (arXiv:1911.11134, section
    3, items 3 and 4).

    Args:
        weight: any shape.
        mask: current mask of the weight, bool, of the same shape.
        scores: returns the criterion for adding elements, of the same shape, which is changed.
        fraction: fraction of the kept elements to exchange, 0 to 1.

    Returns:
        The new mask, bool, of the same shape. It keeps as many elements as `mask`.
    """
    present = int(mask.sum())
    count = min(max(round(fraction * present), 0), present, mask.numel() - present)
    kept = largest(weight.abs().masked_fill_(~mask, -1.0), present - count)
    return kept | largest(scores().masked_fill_(kept, -torch.inf), count)


class PackedMask:
    """A mask stored with one bit per element.

    Args:
        mask: bool, any shape.
    """

    def __init__(self, mask: Tensor) -> None:
        self.shape = mask.shape
        self.bits = torch.from_numpy(np.packbits(mask.reshape(-1).numpy()))

    @classmethod
    def of_bits(cls, bits: Tensor, shape: torch.Size) -> PackedMask:
        """Construct a mask of `shape` from the tensor of its bits (uint8), which is not copied."""
        packed = cls.__new__(cls)
        packed.bits, packed.shape = bits, shape
        return packed

    def counts(self, block: int) -> list[int]:
        """Return the number of kept elements in each block of `block` elements, a multiple of 8."""
        bits, step = self.bits.numpy(), block // 8
        return [int(_ONES[bits[at : at + step]].sum()) for at in range(0, len(bits), step)]

    @cached_property
    def count(self) -> int:
        """The number of kept elements."""
        return sum(self.counts(_BLOCK))

    def unpack(self) -> Tensor:
        """Return the mask as a bool tensor."""
        flat = np.unpackbits(self.bits.numpy(), count=math.prod(self.shape))
        return torch.from_numpy(flat.view(np.bool_)).view(self.shape)
