"""The table of features of random programs. Modules of this package register their features in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from headwater.conform.grammar.program import Kind, Writer

KINDS: dict[str, Kind] = {}
"""Every feature by name."""


def layer(targets: int = 0, **options: Sequence[Any]) -> Callable[[Writer], Writer]:
    """Return a decorator that registers a feature of models under the name of the function."""
    return _register(targets, options, in_loop=False)


def loop(targets: int = 0, **options: Sequence[Any]) -> Callable[[Writer], Writer]:
    """Return a decorator that registers a feature of training loops under the name of the function."""
    return _register(targets, options, in_loop=True)


def _register(
    targets: int, options: dict[str, Sequence[Any]], *, in_loop: bool
) -> Callable[[Writer], Writer]:
    def register(write: Writer) -> Writer:
        name = write.__name__
        assert name not in KINDS, f"two features are called {name}"
        KINDS[name] = Kind(name, write, options, targets, in_loop)
        return write

    return register
