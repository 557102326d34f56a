"""Which ranks of a run compute, and which keep masters and optimizer state."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Placement:
    """The ranks of a run.

    Attributes:
        num_csx: compute ranks; they come first.
        num_memx: store ranks, which do not compute.
    """

    num_csx: int = 1
    num_memx: int = 0

    @property
    def size(self) -> int:
        """How many there are."""
        return self.num_csx + self.num_memx

    @property
    def owners(self) -> range:
        """Those that keep masters and optimizer state, and update: the store ranks; without any, all."""
        return range(self.num_csx if self.num_memx else 0, self.size)


ONE_RANK = Placement()
