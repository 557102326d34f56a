"""The base class of schedules, and helpers for their formulas."""

from __future__ import annotations

import abc
import itertools
import math
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from headwater.core.errors import ConfigError

Rate = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Steps = Annotated[int, Field(ge=0)]
Period = Annotated[int, Field(ge=1)]


class Schedule(abc.ABC):
    """A value as a function of the optimizer step, which counts from 0."""

    @abc.abstractmethod
    def value(self, step: int) -> float:
        """Return the value at `step` >= 0."""

    @property
    def length(self) -> int | None:
        """Number of steps after which the next schedule of a sequence starts; `None` if it never ends."""
        return None


def cosine(initial: float, end: float, progress: float) -> float:
    """Return the value of half a cosine from `initial` to `end`.

    SGDR without restarts (Loshchilov and Hutter, arXiv:1608.03983, equation 5).

    Args:
        initial: value at the start.
        end: value at the end.
        progress: position, 0 (start) to 1 (end). Beyond 1 the cosine continues.
    """
    return end + (initial - end) * (1 + math.cos(math.pi * progress)) / 2


def passed(milestones: Sequence[int], step: int) -> int:
    """Return the number of milestones <= `step`."""
    return sum(step >= milestone for milestone in milestones)


def check_milestones(milestones: Sequence[int], parts: int | None = None) -> None:
    """Raise if milestones are negative or not in ascending order, or their number does not fit.

    Args:
        milestones: steps.
        parts: number of schedules or values that the milestones separate; not checked if `None`.

    Raises:
        ConfigError: if the milestones are wrong in one of these ways.
    """
    if any(later < earlier for earlier, later in itertools.pairwise((0, *milestones))):
        raise ConfigError(
            f"expected milestones >= 0 in ascending order, got {list(milestones)}", remedy="sort them"
        )
    if parts is not None and parts != len(milestones) + 1:
        raise ConfigError(
            f"expected one milestone fewer than the {parts} parts, got {len(milestones)} milestones",
            remedy="give a milestone for every part but the first",
        )
