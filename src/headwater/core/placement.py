"""The numbers of compute ranks and store ranks of a run, and the job of the queue that it is."""

from __future__ import annotations

import dataclasses

from headwater.core.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Placement:
    """The number of compute ranks and store ranks of a run.

    Attributes:
        num_csx: number of compute ranks; they come first.
        num_memx: number of store ranks, which keep masters and optimizer state and do not compute.
    """

    num_csx: int = 1
    num_memx: int = 0

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.num_csx + self.num_memx

    @property
    def owners(self) -> range:
        """The ranks that keep masters and optimizer state: the store ranks if any, otherwise all ranks."""
        return range(self.num_csx if self.num_memx else 0, self.size)


ONE_RANK = Placement()

JOB = "HEADWATER_JOB"
"""Environment variable in which a job of the queue finds its name."""


def wrong_num_csx(num_csx: int, most: int, limit: str) -> str:
    """Return the message for a number of CSXs that is not between 1 and `most`.

    Args:
        num_csx: the number that was given.
        most: the largest valid number.
        limit: the things that limit it, such as `cores of this machine`.
    """
    return f"expected num_csx to be {_valid(most)} ({limit}), got {num_csx}"


def check_csx_limit(num_csx: int, most: int, limit: str, *, where: str, remedy: str | None = None) -> None:
    """Raise if a number of CSXs is not between 1 and `most`.

    Args:
        num_csx: the number that was given.
        most: the largest valid number.
        limit: the things that limit it, such as `cores of this machine`.
        where: the place where the user wrote the number.
        remedy: a way to allow more; added to the advice to write a valid number.

    Raises:
        ConfigError: if the number is not valid.
    """
    if not 1 <= num_csx <= most:
        advice = f"write {_valid(most)}"
        raise ConfigError(
            wrong_num_csx(num_csx, most, limit),
            where=where,
            remedy=f"{advice}, or {remedy}" if remedy else advice,
        )


def _valid(most: int) -> str:
    return f"1 to {most}" if most > 1 else "1"
