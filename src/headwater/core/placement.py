"""Numbers of compute ranks and store ranks of a run."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Placement:
    """The ranks of a run.

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
        """Ranks that keep masters and optimizer state: the store ranks, or all ranks if there are not any."""
        return range(self.num_csx if self.num_memx else 0, self.size)


ONE_RANK = Placement()
