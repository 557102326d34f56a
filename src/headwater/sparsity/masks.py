"""Masks: which elements of a weight are there. Functions of tensors alone."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

INIT_METHODS = ("random", "topk", "from_zeros", "checkerboard")
"""Ways to choose the first mask."""


def first_mask(weight: Tensor, sparsity: float, method: str, generator: torch.Generator) -> Tensor:
    """The mask that a weight begins with.

    Args:
        weight: any shape.
        sparsity: share of its elements that are masked.
        method: `random`; `topk` keeps the largest; `from_zeros` masks what is zero already; `checkerboard`
            spreads what is kept evenly.
        generator: of the random one.

    Returns:
        Of the same shape, bool: true where an element is kept.
    """
    kept = num_kept(weight.numel(), sparsity)
    match method:
        case "random":
            return largest(torch.rand(weight.shape, generator=generator), kept)
        case "topk":
            return largest(weight.abs(), kept)
        case "from_zeros":
            return weight != 0
        case "checkerboard":
            places = torch.arange(weight.numel() + 1, dtype=torch.float64)
            steps = (places * (kept / max(weight.numel(), 1))).round()
            return (steps[1:] > steps[:-1]).view(weight.shape)
    raise AssertionError(f"no way to make a mask is called {method}")


def largest(scores: Tensor, count: int) -> Tensor:
    """Where the `count` largest elements of `scores` are; bool, of the same shape."""
    mask = torch.zeros(scores.numel(), dtype=torch.bool)
    mask[scores.reshape(-1).topk(count, sorted=False).indices] = True
    return mask.view(scores.shape)


def num_kept(numel: int, sparsity: float) -> int:
    """Elements that are there at a sparsity."""
    return numel - round(min(max(sparsity, 0.0), 1.0) * numel)


def exchanged(weight: Tensor, mask: Tensor, scores: Tensor, fraction: float) -> Tensor:
    """A mask in which the smallest weights made room for the elements of the highest scores.

    As many are added as are dropped; what was just dropped may come back if its score is high enough
    (arXiv:1911.11134, section 3, 3 and 4).

    Args:
        weight: the weight.
        mask: of the weight.
        scores: of the same shape.
        fraction: share of the elements that are there to be exchanged.
    """
    present = int(mask.sum())
    count = min(max(round(fraction * present), 0), present, mask.numel() - present)
    kept = largest(weight.abs().masked_fill(~mask, -1.0), present - count)
    return kept | largest(scores.masked_fill(kept, -torch.inf), count)


class PackedMask:
    """A mask at one bit for each element.

    Args:
        mask: bool, any shape.
    """

    def __init__(self, mask: Tensor) -> None:
        self.shape = mask.shape
        self.bits = torch.from_numpy(np.packbits(mask.reshape(-1).numpy()))

    @classmethod
    def of_bits(cls, bits: Tensor, shape: torch.Size) -> PackedMask:
        """The mask whose `bits` these are."""
        packed = cls.__new__(cls)
        packed.bits, packed.shape = bits, shape
        return packed

    def unpack(self) -> Tensor:
        """The mask, bool."""
        flat = np.unpackbits(self.bits.numpy(), count=math.prod(self.shape))
        return torch.from_numpy(flat.view(np.bool_)).view(self.shape)
