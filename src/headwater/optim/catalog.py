"""The optimizers that are known by name, and what is known of them."""

from __future__ import annotations

from functools import cache

import torch

from headwater.core.errors import ConfigError
from headwater.optim.arguments import nearest
from headwater.optim.extra import Lamb, Lion

OptimizerClass = type[torch.optim.Optimizer]

FUSED = {
    "cpu": frozenset({"Adam", "AdamW", "SGD", "Adagrad"}),
    "cuda": frozenset({"Adam", "AdamW", "SGD"}),
}
"""Optimizers of torch with a fused kernel, by device."""

_ELEMENTWISE = frozenset({
    "SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop",
    "Lion",
})  # fmt: skip

_REFUSED = {
    "LBFGS": "it calls the model several times a step and needs all gradients at once",
    "SparseAdam": "it takes sparse gradients, and the weight store keeps dense ones",
}


def is_elementwise(name: str) -> bool:
    """Whether the update of an element depends on the gradient and state of that element alone.

    Such an update may be applied to any piece of a parameter, in any order.
    """
    return name in _ELEMENTWISE


@cache
def optimizers() -> dict[str, OptimizerClass]:
    """The optimizers of torch and Headwater that can be used, by name."""
    base = torch.optim.Optimizer
    found = {
        name: cls
        for name, cls in vars(torch.optim).items()
        if isinstance(cls, type) and issubclass(cls, base) and cls is not base and name not in _REFUSED
    }
    return {**found, "Lamb": Lamb, "Lion": Lion}


def find_optimizer(name: str, *, exact_case: bool = True) -> OptimizerClass:
    """The optimizer called `name`.

    Args:
        name: class name.
        exact_case: whether case counts.

    Raises:
        ConfigError: if there is none, or it cannot be streamed.
    """
    candidates = [*optimizers(), *_REFUSED]
    found = next((c for c in candidates if c == name or (not exact_case and c.lower() == name.lower())), name)
    if found in _REFUSED:
        raise refusal(found, _REFUSED[found])
    if found not in optimizers():
        known = f"there are: {', '.join(sorted(optimizers()))}"
        close = nearest(name, optimizers())
        remedy = f"did you mean {close}? {known}" if close else known
        raise ConfigError(f"torch.optim has no optimizer {name!r}, nor has headwater.optim", remedy=remedy)
    return optimizers()[found]


def refusal(name: str, why: str, lr: object = 1e-3) -> ConfigError:
    """The error for an optimizer that streamed parameters cannot have."""
    return ConfigError(
        f"{name} cannot be used here: {why}",
        remedy=f"write for example optimizer = headwater.optim.AdamW(model.parameters(), lr={lr})",
    )
