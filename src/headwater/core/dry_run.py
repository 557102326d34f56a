"""A flag for code that may leave out repeated work while a dry run counts what a step costs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_COUNTS_COSTS: ContextVar[bool] = ContextVar("counts_costs", default=False)


def counts_costs() -> bool:
    """True if values do not matter now: only shapes, FLOPs and bytes of the operators count."""
    return _COUNTS_COSTS.get()


@contextmanager
def counting_costs() -> Iterator[None]:
    """Set the flag inside the context."""
    token = _COUNTS_COSTS.set(True)
    try:
        yield
    finally:
        _COUNTS_COSTS.reset(token)
