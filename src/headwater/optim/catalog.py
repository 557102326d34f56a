"""The catalog of optimizers: those available by name, and their properties."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import torch

from headwater.core.errors import ConfigError
from headwater.core.names import nearest
from headwater.optim.extra import Lamb, Lion

OptimizerClass = type[torch.optim.Optimizer]

FUSED = {
    "cpu": frozenset({"Adam", "AdamW", "SGD", "Adagrad"}),
    "cuda": frozenset({"Adam", "AdamW", "SGD"}),
}
"""Optimizers of torch with a fused kernel, by device."""

_ELEMENTWISE = frozenset({
    "SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop",
    "Lion", "SparseAdam",
})  # fmt: skip

_REFUSED = {
    "LBFGS": "it calls the model several times a step and needs all gradients at once",
}
"""Optimizers of torch that cannot stream, with the reason."""


def is_elementwise(name: str) -> bool:
    """True if the update of an element depends only on the gradient and state of this element.

    Such an update may be applied to any slice of a parameter, in any order.
    """
    return name in _ELEMENTWISE


def require_elementwise(name: str, *, where: str | None = None) -> None:
    """Raise if an optimizer's update of a weight depends on other weights: masked weights would not stay 0.

    Args:
        name: class of the optimizer.
        where: the place of the optimizer, for the error.

    Raises:
        ConfigError: if the update of a weight depends on other weights.
    """
    if not is_elementwise(name):
        raise ConfigError(
            f"{name} does not update each weight by itself: masked weights would not stay zero",
            where=where,
            remedy="use an optimizer that updates each weight by itself, such as AdamW or SGD",
        )


def takes_sparse_gradients(name: str, options: Mapping[str, Any]) -> bool:
    """True if an optimizer can update parameters whose gradients are sparse tensors.

    The limits are torch's, and one more: SGD with momentum is excluded, because its state would be sparse.

    Args:
        name: class name of the optimizer.
        options: options of a parameter group.
    """
    if name == "SGD":
        return not (options.get("momentum") or options.get("weight_decay"))
    return name == "SparseAdam" or (name == "Adagrad" and not options.get("weight_decay"))


def takes_dense_gradients(name: str) -> bool:
    """True if the optimizer called `name` can update parameters whose gradients are dense tensors."""
    return name != "SparseAdam"


@cache
def optimizers() -> dict[str, OptimizerClass]:
    """Return the classes of all available optimizers of torch and Headwater, by name."""
    base = torch.optim.Optimizer
    found = {
        name: cls
        for name, cls in vars(torch.optim).items()
        if isinstance(cls, type) and issubclass(cls, base) and cls is not base and name not in _REFUSED
    }
    return {**found, "Lamb": Lamb, "Lion": Lion}


def is_known(kind: OptimizerClass) -> bool:
    """True for a class of torch or Headwater that can stream; false for a class of the user."""
    # By identity: a user's class may have the name of one of torch's.
    return optimizers().get(kind.__name__) is kind


def find_optimizer(name: str, *, exact_case: bool = True) -> OptimizerClass:
    """Return the optimizer class called `name`.

    Args:
        name: class name.
        exact_case: false to ignore case.

    Raises:
        ConfigError: if the name is unknown, or the optimizer cannot stream.
    """
    candidates = [*optimizers(), *_REFUSED]
    found = next((c for c in candidates if c == name or (not exact_case and c.lower() == name.lower())), name)
    if found in _REFUSED:
        raise refusal(found, _REFUSED[found])
    if found not in optimizers():
        known = f"available: {', '.join(sorted(optimizers()))}"
        close = nearest(name, optimizers())
        remedy = f"did you mean {close}? {known}" if close else known
        raise ConfigError(f"unknown optimizer {name!r}", remedy=remedy)
    return optimizers()[found]


_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def constructor_of(kind: OptimizerClass) -> dict[str, inspect.Parameter]:
    """Return the constructor's parameters by name.

    If the constructor has `*args` or `**kwargs`, the parameters of its base class's constructor are included,
    except those of `torch.optim.Optimizer`.
    """
    taken: dict[str, inspect.Parameter] = {}
    for parameters in _constructors(kind):
        taken = {p.name: p for p in parameters if p.kind not in _VARIABLE} | taken
    return taken


def takes_any_option(kind: OptimizerClass) -> bool:
    """True if the constructor and those to which it may pass arguments have `**kwargs`."""
    return all(any(p.kind is p.VAR_KEYWORD for p in parameters) for parameters in _constructors(kind))


def _constructors(kind: OptimizerClass) -> Iterator[list[inspect.Parameter]]:
    """Yield the parameters of the constructor, and of those of base classes that may get its arguments."""
    for base in kind.__mro__:
        if base is torch.optim.Optimizer:  # the code of the class chooses its `defaults`
            return
        if "__init__" in vars(base):
            # Without the first, which is the object itself, whatever its name is.
            _, *parameters = inspect.signature(base.__init__).parameters.values()  # type: ignore[misc]
            yield parameters
            if not any(p.kind in _VARIABLE for p in parameters):
                return


def refusal(name: str, why: str) -> ConfigError:
    """Return the error for an optimizer that cannot update streamed parameters.

    Args:
        name: name of the optimizer.
        why: the reason, a clause.
    """
    return ConfigError(
        f"{name} cannot be used here: {why}",
        remedy="write for example: optimizer = headwater.optim.AdamW(model.parameters(), lr=1e-3)",
    )
