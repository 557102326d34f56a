"""Plain tensors, whose numbers a kernel of the package can read from memory."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def is_plain(tensor: Tensor) -> bool:
    """True if the numbers of a tensor are in CPU memory as they are.

    False for other devices, fake tensors and other subclasses, sparse tensors, and views that change the
    sign of each number when an operator reads it.
    """
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.is_cpu  # the name of its device takes ten times as long
        and tensor.layout is torch.strided
        and not tensor.is_neg()
    )
