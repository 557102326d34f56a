"""What a schedule is, and what the formulas have in common."""

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
    """A value that depends on the optimizer step, which counts from 0."""

    @abc.abstractmethod
    def value(self, step: int) -> float:
        """The value at `step` >= 0."""

    @property
    def length(self) -> int | None:
        """Steps after which another schedule may take over; `None` if it goes on for ever."""
        return None


def cosine(initial: float, end: float, progress: float) -> float:
    """Half a cosine from `initial` to `end`, of which `progress` (0 to 1) is behind.

    SGDR without restarts (Loshchilov and Hutter, arXiv:1608.03983, equation 5).
    """
    return end + (initial - end) * (1 + math.cos(math.pi * progress)) / 2


def passed(milestones: Sequence[int], step: int) -> int:
    """How many of the milestones are behind, or reached."""
    return sum(step >= milestone for milestone in milestones)


def check_milestones(milestones: Sequence[int], parts: int | None = None) -> None:
    """Check that milestones are in order and, if `parts` is given, that they separate as many parts.

    Raises:
        ConfigError: if not.
    """
    if any(later < earlier for earlier, later in itertools.pairwise((0, *milestones))):
        raise ConfigError(
            f"milestones {list(milestones)} are not in order", remedy="let them increase, from 0 or more"
        )
    if parts is not None and parts != len(milestones) + 1:
        raise ConfigError(
            f"{len(milestones)} milestones separate {len(milestones) + 1} parts, and there are {parts}",
            remedy="give one milestone fewer than parts",
        )
