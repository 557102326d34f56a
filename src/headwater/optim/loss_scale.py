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
            doubled after `growth_interval` good ones (Micikevicius et al., arXiv:1710.03740, section 3.2).
        good_steps: good steps in a row since it last changed.
        growth_interval: see `dynamic`.
        smallest: it does not fall below this.
        largest: nor rise above this.
        overflow_tolerance: share of the steps since it last changed that may be not finite, with no change.
        steps: steps since it last changed.
        overflows: those among them that were not finite.
    """

    value: float = 1.0
    dynamic: bool = False
    good_steps: int = 0
    growth_interval: int = GROWTH_INTERVAL
    smallest: float = SMALLEST
    largest: float = LARGEST
    overflow_tolerance: float = 0.0
    steps: int = 0
    overflows: int = 0

    @classmethod
    def of(cls, precision: Precision) -> LossScale:
        """The scale with which a run in `precision` starts."""
        if precision.loss_scale == "dynamic":
            return cls(INITIAL, dynamic=True)
        return cls(precision.loss_scale)

    @property
    def may_skip(self) -> bool:
        """Whether a step that is not finite may be the fault of the scale: to be skipped, not reported."""
        return self.dynamic and self.value > self.smallest

    def after(self, *, applied: bool) -> LossScale:
        """The scale after a step that was applied, or skipped as not finite."""
        if not self.dynamic:
            return self
        good_steps = self.good_steps + 1 if applied else 0
        steps, overflows = self.steps + 1, self.overflows + (not applied)
        if good_steps >= self.growth_interval:
            return self._changed(self.value * GROWTH)
        if not applied and overflows > self.overflow_tolerance * steps:
            return self._changed(self.value / GROWTH)
        return dataclasses.replace(self, good_steps=good_steps, steps=steps, overflows=overflows)

    def _changed(self, value: float) -> LossScale:
        value = min(max(value, self.smallest), self.largest)
        return dataclasses.replace(self, value=value, good_steps=0, steps=0, overflows=0)
