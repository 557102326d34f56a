"""A flag for dry runs, and a mark of module classes by which a dry run can skip equal modules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from torch import nn

_COUNTS_COSTS: ContextVar[bool] = ContextVar("counts_costs", default=False)

_COSTS_BY_SHAPES: set[type[nn.Module]] = set()

Kind = TypeVar("Kind", bound=type[nn.Module])


def costs_by_shapes(kind: Kind) -> Kind:
    """Mark a module class whose calls depend only on attributes and inputs, and have no side effect.

    A dry run calls only a few of many equal modules of this class; see [Note: repeated stages] in
    `plan/repeats.py`.
    """
    _COSTS_BY_SHAPES.add(kind)
    return kind


def has_costs_by_shapes(module: nn.Module) -> bool:
    """True if `costs_by_shapes` has marked the class of a module. A mark of a base class does not count."""
    return type(module) in _COSTS_BY_SHAPES


def counts_costs() -> bool:
    """True if the model runs only to count FLOPs and bytes of operators, so that values do not matter."""
    return _COUNTS_COSTS.get()


@contextmanager
def counting_costs() -> Iterator[None]:
    """Enter a context in which `counts_costs` returns true."""
    token = _COUNTS_COSTS.set(True)
    try:
        yield
    finally:
        _COUNTS_COSTS.reset(token)
