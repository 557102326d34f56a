"""The keys that a mask of attention lets queries see, for a kernel that reads no masks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from headwater.core.dry_run import counts_costs
from headwater.core.plain import is_plain


class SeenKeys(NamedTuple):
    """The keys that queries see.

    Attributes:
        causal: query i sees no keys after key i.
        counts: number of first keys that the queries of each sequence see, [batch]. `None`: all keys.
    """

    causal: bool
    counts: Tensor | None = None


def seen_keys(mask: Tensor, batches: int, queries: int, keys: int) -> SeenKeys | None:
    """Return what a mask lets queries see, if all queries of a sequence see its first keys, causally or not.

    Padding after the text has such masks.

    Args:
        mask: True for visible keys, broadcasts to [batch, heads, queries, keys].
        batches: number of sequences.
        queries: queries of each sequence.
        keys: keys of each sequence.

    Returns:
        `None` for any other mask, for one that hides all keys of a sequence, and if the values of the mask
        cannot be read. In a dry run, what the mask of a step probably lets queries see.
    """
    fits = (
        mask.dim() == 4
        and mask.shape[0] in (1, batches)
        and mask.shape[1] == 1
        and mask.shape[2] in (1, queries)
        and mask.shape[3] == keys
    )
    is_readable = (is_plain(mask) or counts_costs()) and not torch.compiler.is_compiling()
    if not fits or mask.dtype != torch.bool or not is_readable:
        return None
    if counts_costs() and mask.shape[2] == 1:
        # A plan may know no values. A mask of keys alone is usually one of padding.
        return SeenKeys(causal=False, counts=torch.ones(batches, dtype=torch.int64, device="cpu"))
    # In a dry run the comparisons below are false if the values are not known.
    rows = mask[:, 0]
    counts = rows[:, -1].sum(-1)
    expected = (torch.arange(keys, device="cpu") < counts[:, None])[:, None]
    causal = rows.shape[1] > 1 and not torch.equal(rows[:, :1], expected)
    if causal:
        expected = expected & torch.ones(queries, keys, dtype=torch.bool, device="cpu").tril()
    if int(counts.min()) == 0 or not torch.equal(rows, expected.expand_as(rows)):
        return None
    return SeenKeys(causal, counts.expand(batches).contiguous())
