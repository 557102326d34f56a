"""The time of a step's first forward on a GPU, while the host updates the stages and copies them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class Use:
    """One use of a stage in the first forward of a step.

    Attributes:
        compute_s: seconds on the GPU.
        update_s: seconds of the stage's update on the host, which comes before the copy.
        copy_s: seconds of the copy to a slab; `None` if the stage is on the GPU already.
    """

    compute_s: float
    update_s: float = 0.0
    copy_s: float | None = None


def forward_s(uses: Iterable[Use], slabs: int) -> float:
    """Return the seconds until the last stage is computed.

    One thread updates the stages in the order of their uses, and the GPU copies each stage after its update.
    A copy needs a free slab. It gets the slab of the stage that was copied `slabs` copies before it, as soon
    as that stage has been computed.

    Args:
        uses: the stages in the order of the forward.
        slabs: number of slabs.
    """
    now_s = updated_s = copied_s = 0.0
    freed_s = [0.0] * slabs
    for use in uses:
        if use.copy_s is not None:
            updated_s += use.update_s
            copied_s = max(updated_s, copied_s, freed_s[-slabs]) + use.copy_s
            now_s = max(now_s, copied_s)
        now_s += use.compute_s
        if use.copy_s is not None:
            freed_s.append(now_s)
    return now_s
