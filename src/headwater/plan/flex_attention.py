"""FlexAttention in the dry run of a GPU.

FlexAttention has no backward on a CPU, so it refuses the tensors of a dry run, which are in host memory. It
also calls functions of the user inside an operator of torch, where a dry run cannot see what they read.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

_MODULE = "torch.nn.attention.flex_attention"


@contextmanager
def flex_attention_of_gpu() -> Iterator[None]:
    """Enter a context in which FlexAttention computes tensors of the right shapes, without the mask."""
    module: Any = sys.modules.get(_MODULE)
    if module is None:  # code that uses FlexAttention has imported it
        yield
        return
    replaced: dict[str, Any] = {
        "flex_attention_hop": _attention,
        "_validate_device": lambda query, key, value: None,
        "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG": True,  # call the operator directly
    }
    before = {name: getattr(module, name) for name in replaced}
    vars(module).update(replaced)
    try:
        yield
    finally:
        vars(module).update(before)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable[..., torch.Tensor],
    block_mask: Any,
    scale: float,
    kernel_options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return an output, the logarithms of the sums of each row, and the largest score of each row.

    Autograd saves what it saves for FlexAttention: query, key, value, the output and the logarithms.

    Args:
        query: [batch, heads, rows, width]
        key: [batch, heads of keys, columns, width]
        value: [batch, heads of keys, columns, width of values]
        score_mod: returns the score to use, given a score and its batch, head, row and column.
        block_mask: the mask, which is not used. So the operations of masked blocks are counted too.
        scale: the factor of the scores.
        kernel_options: not used.
    """
    is_grouped = query.shape[1] != key.shape[1]
    output = scaled_dot_product_attention(query, key, value, scale=scale, enable_gqa=is_grouped)
    place = torch.zeros((), dtype=torch.long, device="cpu")
    score = score_mod(torch.zeros((), device="cpu"), place, place, place, place)
    if score.requires_grad:  # the function has read weights
        output = output + 0 * score
    rows = torch.zeros(query.shape[:-1], device="cpu")
    return output, rows, rows
