"""Uses the kernel for products of few rows in the linear layers of a model, while few tokens are read."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import cast, final

import torch
from torch import nn

from headwater.core.few_rows import MOST_ROWS, few_row_linear, few_row_product_available
from headwater.models.layers.experts import StackedLinear
from headwater.models.layers.linear import Linear
from headwater.models.layers.replaced import Replacement, replaced, replaced_forward


@final
class FewRows:
    """The linear layers of a model that writes texts.

    While a pass of a few tokens runs, the attribute or method that computes the product of a layer is
    replaced. Other passes, and training, use torch's products and check nothing.

    Args:
        model: the model. Only layers that it has now are replaced.
        device: the device of the model. The kernel computes on the CPU.
    """

    def __init__(self, model: object, device: torch.device) -> None:
        has_layers = isinstance(model, nn.Module) and device.type == "cpu" and few_row_product_available()
        modules = cast(nn.Module, model).modules() if has_layers else ()
        self._replacements = list(filter(None, map(_replacement, modules)))

    def of(self, count: int) -> AbstractContextManager[None]:
        """Return a context for a pass that reads `count` tokens."""
        return replaced(self._replacements) if self._replacements and count <= MOST_ROWS else nullcontext()


def _replacement(module: nn.Module) -> Replacement | None:
    if isinstance(module, Linear | StackedLinear):
        return Replacement(module, "multiply", few_row_linear)
    return replaced_forward(module, few_row_linear)
