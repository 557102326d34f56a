"""Cross-entropy over a vocabulary by the package liger-kernel, on a CUDA device."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor, nn

from headwater.core.errors import ConfigError
from headwater.models.decoder import Head
from headwater.models.loss import linear_cross_entropy

_WHERE = "trainer.init.backend.loss"
_IGNORED = -100
"""Target of rows that do not count."""


def use_liger(model: nn.Module, device: str) -> None:
    """Make the language-model heads of a model compute their losses by Liger Kernel.

    Args:
        model: changed in place.
        device: `cpu` or `cuda`: where the model will compute.

    Raises:
        ConfigError: if the device is not CUDA, the package is missing, or the model has no such head.
    """
    if device != "cuda":
        raise ConfigError(
            f"expected a CUDA device for loss: liger, found {device}",
            where=_WHERE,
            remedy="use loss: chunked",
        )
    if importlib.util.find_spec("liger_kernel") is None:
        raise ConfigError(
            "loss: liger needs the package liger-kernel, which is not installed",
            where=_WHERE,
            remedy="pip install liger-kernel, or use loss: chunked",
        )
    heads = [module for module in model.modules() if isinstance(module, Head)]
    if not heads:
        raise ConfigError(
            f"{type(model).__name__} has no language-model head that loss: liger could compute",
            where=_WHERE,
            remedy="use loss: chunked",
        )
    for head in heads:
        head.cross_entropy = liger_cross_entropy


def liger_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    row_weights: Tensor,
    *,
    softcap: float | None = None,
) -> Tensor:
    """Return the same loss as `linear_cross_entropy`, up to rounding.

    Liger Kernel has one factor for all rows. With different factors, and for the dry run of the plan, which
    is not on a GPU, the loss is computed by `linear_cross_entropy`.

    Arguments and result are those of `linear_cross_entropy`.
    """
    if not _is_on_gpu(hidden) or not row_weights.numel() or not _have_one_factor(row_weights):
        return linear_cross_entropy(hidden, weight, bias, targets, row_weights, softcap=softcap)
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    counted = targets.long().masked_fill(row_weights == 0, _IGNORED)
    with torch.autocast(device, enabled=False):
        total: Tensor = _kernel()(
            hidden, weight, counted, bias=bias, ignore_index=_IGNORED, reduction="sum", softcap=softcap
        )
    return total.float() * row_weights.amax()


def _is_on_gpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cuda"


def _have_one_factor(row_weights: Tensor) -> bool:
    """True if all rows that count have the same factor. Waits for the device."""
    return bool(((row_weights == 0) | (row_weights == row_weights.amax())).all())


def _kernel() -> Any:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return liger_fused_linear_cross_entropy
