"""The list of architectures, which the modules of this package fill."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

BATCHES = 3

Made = (
    tuple[nn.Module, list[Any]]
    | tuple[nn.Module, list[Any], Callable[..., Any]]
    | tuple[nn.Module, list[Any], Callable[..., Any] | None, Callable[..., Any]]
)


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A small model that represents an architecture.

    Attributes:
        name: the name of the architecture.
        family: the group of architectures that lists it.
        make: returns model, batches and, if wanted, loss and optimizer.
    """

    name: str
    family: str
    make: Callable[[], Made]


ARCHITECTURES: list[Architecture] = []
"""Every architecture, in the order of the page."""


def architecture(name: str, family: str) -> Callable[[Callable[[], Made]], Callable[[], Made]]:
    """Return a decorator that lists a factory."""

    def register(make: Callable[[], Made]) -> Callable[[], Made]:
        ARCHITECTURES.append(Architecture(name, family, make))
        return make

    return register


def images(size: int = 16, samples: int = 4) -> list[Any]:
    """Return batches of random pictures [samples, 3, size, size]."""
    return [torch.randn(samples, 3, size, size) for _ in range(BATCHES)]


def tokens(vocabulary: int = 20, length: int = 6, samples: int = 4) -> list[Any]:
    """Return batches of random tokens [samples, length]."""
    return [torch.randint(vocabulary, (samples, length)) for _ in range(BATCHES)]


def vectors(width: int = 8, samples: int = 4) -> list[Any]:
    """Return batches of random vectors [samples, width]."""
    return [torch.randn(samples, width) for _ in range(BATCHES)]


def sequences(width: int = 8, length: int = 6, samples: int = 4) -> list[Any]:
    """Return batches of random sequences [samples, length, width]."""
    return [torch.randn(samples, length, width) for _ in range(BATCHES)]
