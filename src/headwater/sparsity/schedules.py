"""Schedules of the sparsity by step, and of the steps at which masks change."""

from __future__ import annotations

import dataclasses
import math
from typing import Protocol


class Value(Protocol):
    """A number as a function of the step."""

    def __call__(self, step: int) -> float: ...


@dataclasses.dataclass(frozen=True)
class Constant:
    """The same number at each step."""

    value: float

    def __call__(self, step: int) -> float:
        return self.value


@dataclasses.dataclass(frozen=True)
class Linear:
    """`init + slope · step`."""

    init: float
    slope: float

    def __call__(self, step: int) -> float:
        return self.init + self.slope * step


@dataclasses.dataclass(frozen=True)
class Exponential:
    """An exponential approach: `final + (init - final) · exp(-gamma · step)`."""

    init: float
    gamma: float
    final: float = 1.0

    def __call__(self, step: int) -> float:
        return self.final + (self.init - self.final) * math.exp(-self.gamma * step)


@dataclasses.dataclass(frozen=True)
class Power:
    """`init · beta ** step`."""

    init: float
    beta: float

    def __call__(self, step: int) -> float:
        return self.init * self.beta**step


@dataclasses.dataclass(frozen=True)
class Cosine:
    """Half a cosine from `init` to `minimum` over `half_period` steps (arXiv:1911.11134, section 3)."""

    init: float
    half_period: float
    minimum: float = 0.0

    def __call__(self, step: int) -> float:
        height = (1 + math.cos(math.pi * step / self.half_period)) / 2
        return self.minimum + (self.init - self.minimum) * height


@dataclasses.dataclass(frozen=True)
class Cubic:
    """A cubic from `init` at step `begin` to `final` at step `end` (arXiv:1710.01878, equation 1)."""

    init: float
    final: float
    begin: int
    end: int

    def __call__(self, step: int) -> float:
        done = min(max((step - self.begin) / (self.end - self.begin), 0.0), 1.0)
        return self.final + (self.init - self.final) * (1 - done) ** 3


@dataclasses.dataclass(frozen=True)
class Cadence:
    """The steps at which masks change: multiples of `freq` from `start` (inclusive) to `stop` (exclusive)."""

    freq: int
    start: int = 0
    stop: int | None = None

    def includes(self, step: int) -> bool:
        """True if `step` is one of these steps."""
        ended = self.stop is not None and step >= self.stop
        return step >= max(self.start, 1) and not ended and step % self.freq == 0
