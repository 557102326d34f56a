"""The loss scale: a factor on the loss that keeps fp16 gradients from underflow and overflow."""

from __future__ import annotations

import dataclasses

from headwater.core.precision import Precision

INITIAL, SMALLEST, LARGEST = 2.0**16, 1.0, 2.0**24
GROWTH, GROWTH_INTERVAL = 2.0, 2000


@dataclasses.dataclass(frozen=True)
class LossScale:
    """The loss scale between two steps: the factor, and the counts that decide when the factor changes.

    Attributes:
        value: the factor.
        dynamic: true if the scale adapts: it is halved after a step with a non-finite gradient, and doubled
            after `growth_interval` finite steps (Micikevicius et al., arXiv:1710.03740, section 3.2).
        good_steps: consecutive finite steps since the last change of the scale.
        growth_interval: see `dynamic`.
        smallest: lower bound of the scale.
        largest: upper bound of the scale.
        overflow_tolerance: fraction of the steps since the last change that may be non-finite before the
            scale is halved.
        steps: steps since the last change.
        overflows: non-finite steps since the last change.
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
        """Return the initial loss scale of a run in `precision`."""
        if precision.loss_scale == "dynamic":
            return cls(INITIAL, dynamic=True)
        return cls(precision.loss_scale)

    @property
    def may_skip(self) -> bool:
        """True if a smaller scale may help: then a non-finite step is skipped, and no error is raised."""
        return self.dynamic and self.value > self.smallest

    def after(self, *, applied: bool) -> LossScale:
        """Return the scale after a step.

        Args:
            applied: true if the step was applied, false if it was skipped as non-finite.
        """
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
