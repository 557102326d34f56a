"""The factor on the loss that keeps fp16 gradients away from zero and from infinity."""

from __future__ import annotations

import dataclasses

from headwater.core.precision import Precision

INITIAL, SMALLEST, LARGEST = 2.0**16, 1.0, 2.0**24
GROWTH, GROWTH_INTERVAL = 2.0, 2000


@dataclasses.dataclass(frozen=True)
class LossScale:
    """A loss scale between two steps.

    Attributes:
        value: the factor.
        dynamic: whether it follows what becomes of the steps: halved by one whose gradient is not finite,
            doubled after `GROWTH_INTERVAL` good ones (Micikevicius et al., arXiv:1710.03740, section 3.2).
        good_steps: steps since it last changed.
    """

    value: float = 1.0
    dynamic: bool = False
    good_steps: int = 0

    @classmethod
    def of(cls, precision: Precision) -> LossScale:
        """The scale with which a run in `precision` starts."""
        if precision.loss_scale == "dynamic":
            return cls(INITIAL, dynamic=True)
        return cls(precision.loss_scale)

    @property
    def may_skip(self) -> bool:
        """Whether a step that is not finite may be the fault of the scale: to be skipped, not reported."""
        return self.dynamic and self.value > SMALLEST

    def after(self, *, applied: bool) -> LossScale:
        """The scale after a step that was applied, or skipped as not finite."""
        if not self.dynamic:
            return self
        if not applied:
            return LossScale(max(self.value / GROWTH, SMALLEST), dynamic=True)
        if self.good_steps + 1 < GROWTH_INTERVAL:
            return dataclasses.replace(self, good_steps=self.good_steps + 1)
        return LossScale(min(self.value * GROWTH, LARGEST), dynamic=True)
