"""Passes of a few tokens: the linear layers of a model by the kernel for products of few rows."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast, final

import torch
from torch import Tensor, nn

from headwater.core.few_rows import MOST_ROWS, few_row_linear, few_row_product_available
from headwater.models.layers.experts import StackedLinear
from headwater.models.layers.linear import Linear


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
        self._replaced = [place for module in modules if (place := _replacement(module)) is not None]

    def of(self, count: int) -> AbstractContextManager[None]:
        """Return a context for a pass that reads `count` tokens."""
        return self._pass() if self._replaced and count <= MOST_ROWS else nullcontext()

    @contextmanager
    def _pass(self) -> Iterator[None]:
        # Attributes of the object, without `nn.Module.__setattr__`, which takes ten times as long.
        before = [(vars(module), name, function) for module, name, function in self._replaced]
        before = [(own, name, function) for own, name, function in before if name not in own]
        for own, name, function in before:
            own[name] = function
        try:
            yield
        finally:
            for own, name, _ in before:
                own.pop(name, None)


def _replacement(module: nn.Module) -> tuple[nn.Module, str, Any] | None:
    """Return a layer, the attribute that computes its product, and the function to use there."""
    if isinstance(module, Linear | StackedLinear):
        return module, "multiply", few_row_linear
    # A subclass of another library may do more in its forward.
    if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
        return module, "forward", functools.partial(_linear, module)
    return None


def _linear(module: nn.Linear, input: Tensor) -> Tensor:
    return few_row_linear(input, module.weight, module.bias)
