"""Batches whose sequences end with padding."""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from benchmarks.options import fraction

_MOST = 0.5


def add_padding_argument(parser: argparse.ArgumentParser) -> None:
    """Add the option `--padding`, the share that `text_mask` takes."""
    parser.add_argument(
        "--padding",
        type=_share,
        default=0.0,
        help="mean share of positions that are padding, at the ends of the sequences; a mask hides it",
    )


def _share(text: str) -> float:
    share = fraction(text)
    if share > _MOST:
        raise argparse.ArgumentTypeError(f"expected at most {_MOST}, found {text!r}")
    return share


def text_mask(sequences: int, length: int, share: float) -> Tensor:
    """Return a mask that is true for text and false for the padding after it, [sequences, length].

    The first sequence has no padding and the last one twice the mean.

    Args:
        sequences: number of sequences.
        length: positions of each sequence.
        share: mean share of positions that are padding, at most 0.5.
    """
    shares = torch.linspace(0, 2 * share, sequences) if sequences > 1 else torch.tensor([share])
    lengths = ((1 - shares) * length).round().clamp_min(1)
    return torch.arange(length) < lengths[:, None]
