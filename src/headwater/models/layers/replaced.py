"""Replacements of what computes the product of a linear layer, for the duration of a context."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Function of an input, a weight and a bias, as `torch.nn.functional.linear`."""


class Replacement(NamedTuple):
    """An attribute of a layer that computes its product, and the value to use instead."""

    layer: nn.Module
    attribute: str
    value: Any


def replaced_forward(module: nn.Module, multiply: Multiply) -> Replacement | None:
    """Return the replacement of the forward of torch's linear layer.

    Args:
        module: any module.
        multiply: computes the product.

    Returns:
        The replacement; `None` if the module is not a linear layer, or a subclass, whose forward may do more.
    """
    if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
        return Replacement(module, "forward", functools.partial(_forward, module, multiply))
    return None


def _forward(layer: nn.Linear, multiply: Multiply, input: Tensor) -> Tensor:
    return multiply(input, layer.weight, layer.bias)


@contextmanager
def replaced(replacements: Sequence[Replacement]) -> Iterator[None]:
    """Enter a context in which layers have these attributes.

    If a layer itself already has an attribute of this name, it is kept: it may be a wrapper of the forward.
    """
    # Without `nn.Module.__setattr__`, which takes ten times as long.
    given = [(vars(layer), attribute, value) for layer, attribute, value in replacements]
    given = [(own, attribute, value) for own, attribute, value in given if attribute not in own]
    for own, attribute, value in given:
        own[attribute] = value
    try:
        yield
    finally:
        for own, attribute, value in given:
            if own.get(attribute) is value:
                del own[attribute]
