"""Differences between a call of a model and the calls before it, and the decision if they need a new plan."""

from __future__ import annotations

import dataclasses
import enum
from typing import Self

from headwater.fabric.fabric import Fabric

_FLAGS = ("structure", "trains_more", "first_training", "retrained", "precision")


class Need(enum.Enum):
    """The work that must be done before a call of a model can run."""

    NOTHING = "nothing: the plan fits"
    DRY_RUN = "a dry run, and a new plan if the forward changes other weights than in the plan's dry run"
    PLAN = "a new plan"


@dataclasses.dataclass(frozen=True)
class CallChanges:
    """The differences between a call of a model and the calls before it.

    Attributes:
        size: number of elements in the arguments of the call.
        structure: true if the structure of the model has changed since it was planned.
        trains_more: true if a parameter requires a gradient, but the plan does not train it.
        first_training: true if the model is in training mode, and no dry run was made in this mode yet.
        retrained: true if the set of parameters that require gradients differs from that of the last call.
        precision: true if weights are streamed in bf16 or fp16, but autocast does not use that dtype here.
    """

    size: int
    structure: bool
    trains_more: bool
    first_training: bool
    retrained: bool
    precision: bool

    def need(self, largest_size: int | None) -> Need:
        """Return the work that must be done before the call.

        Args:
            largest_size: the size of the largest call for which the plan was made; `None` without a plan.
        """
        is_larger = largest_size is None or self.size > largest_size
        if is_larger or self.trains_more or self.structure or self.precision:
            return Need.PLAN
        return Need.DRY_RUN if self.first_training else Need.NOTHING

    def of_any_rank(self, fabric: Fabric) -> Self:
        """Combine the differences of all ranks: the largest size, and each flag that is true on any rank.

        All ranks must call this. If one rank needs a new plan, all ranks make one, because planning waits for
        all ranks.
        """
        # Size and flags are packed into one number: exchanging objects at every forward would be slower.
        flags = sum(getattr(self, name) << bit for bit, name in enumerate(_FLAGS))
        packed = self.size << len(_FLAGS) | flags
        seen = [int(each) for each in fabric.gather(packed, "the model to be called")]
        merged = {name: any(each >> bit & 1 for each in seen) for bit, name in enumerate(_FLAGS)}
        return dataclasses.replace(self, size=max(seen) >> len(_FLAGS), **merged)
