"""The loss of a language model's head as plain PyTorch computes it, with all logits in memory."""

import torch
from torch.nn import functional as F


def plain_cross_entropy(hidden, weight, bias, targets, row_weights):
    """Return the sum of the rows' cross-entropies, each times its factor, in fp32 (fp64 for fp64)."""
    logits = F.linear(hidden, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = F.cross_entropy(logits, targets.long(), reduction="none")
    return (losses * row_weights).sum()
