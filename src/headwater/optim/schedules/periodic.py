"""Schedules that rise and fall."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

from pydantic import Field

from headwater.core.errors import ConfigError
from headwater.optim.schedules.base import Period, Rate, Schedule, cosine


@dataclasses.dataclass(frozen=True)
class CosineAnnealing(Schedule):
    """A cosine between `initial` and `eta_min` with a period of `2 * T_max` steps.

    The same as `torch.optim.lr_scheduler.CosineAnnealingLR`.
    """

    initial: Rate
    T_max: Period
    eta_min: Rate = 0.0

    def value(self, step: int) -> float:
        return cosine(self.initial, self.eta_min, step / self.T_max)


@dataclasses.dataclass(frozen=True)
class CosineAnnealingWarmRestarts(Schedule):
    """Half a cosine from `initial` to `eta_min`, restarted at its end.

    The first period has `T_0` steps, each further one `T_mult` times as many as the one before.

    The same as `torch.optim.lr_scheduler.CosineAnnealingWarmRestarts`: SGDR (arXiv:1608.03983).
    """

    initial: Rate
    T_0: Period
    T_mult: Period = 1
    eta_min: Rate = 0.0

    def value(self, step: int) -> float:
        length = self.T_0
        # The loop below would take one turn for each period so far.
        if self.T_mult == 1:
            step %= length
        while step >= length:
            step -= length
            length *= self.T_mult
        return cosine(self.initial, self.eta_min, step / length)


@dataclasses.dataclass(frozen=True)
class Cyclic(Schedule):
    """A triangle wave: from `lower` to `upper` in `step_size_up` steps, and back in `step_size_down` steps.

    The same as `torch.optim.lr_scheduler.CyclicLR` (Smith, arXiv:1506.01186).

    Attributes:
        step_size_down: `step_size_up` if `None`.
        mode: `triangular` keeps the height of the triangles. `triangular2` halves it after each triangle.
            `exp_range` multiplies it by `gamma ** step`.
        scale_mode: `cycle` or `iterations`; accepted only if it agrees with `mode`, which determines it.
    """

    lower: Rate
    upper: Rate
    step_size_up: Period = 2000
    step_size_down: Period | None = None
    mode: Literal["triangular", "triangular2", "exp_range"] = "triangular"
    gamma: Rate = 1.0
    scale_mode: Literal["cycle", "iterations"] | None = None

    def __post_init__(self) -> None:
        follows = "iterations" if self.mode == "exp_range" else "cycle"
        if self.scale_mode not in (None, follows):
            raise ConfigError(
                f"expected scale_mode {follows!r} with mode {self.mode!r}, got {self.scale_mode!r}",
                remedy=f"remove scale_mode, or write {follows!r}",
            )

    def value(self, step: int) -> float:
        down = self.step_size_down or self.step_size_up
        cycle, position = divmod(step, self.step_size_up + down)
        rising = position <= self.step_size_up
        height = position / self.step_size_up if rising else 1 - (position - self.step_size_up) / down
        return self.lower + (self.upper - self.lower) * height * self._scale(cycle, step)

    def _scale(self, cycle: int, step: int) -> float:
        if self.mode == "triangular":
            return 1.0
        return 0.5**cycle if self.mode == "triangular2" else self.gamma**step


@dataclasses.dataclass(frozen=True)
class OneCycle(Schedule):
    """A rise from `initial` to `peak`, then a fall to `initial / final_div_factor`, then this value.

    The same as `torch.optim.lr_scheduler.OneCycleLR`, where `initial` is `max_lr / div_factor`
    (Smith and Topin, arXiv:1708.07120).

    Attributes:
        total_steps: steps of the whole cycle.
        pct_start: fraction of the steps of the rise, 0 to 1.
        three_phase: true to fall to `initial` in as many steps as the rise took, and then to the end.
        anneal_strategy: shape of each phase, `cos` or `linear`.
    """

    initial: Rate
    peak: Rate
    total_steps: Period = 1000
    pct_start: Annotated[float, Field(ge=0, le=1)] = 0.3
    final_div_factor: Annotated[float, Field(gt=0)] = 1e4
    three_phase: bool = False
    anneal_strategy: Literal["cos", "linear"] = "cos"

    def value(self, step: int) -> float:
        ends, levels = self._phases()
        phase = sum(step > end for end in ends[:-1])
        start = ends[phase - 1] if phase else 0.0
        length = ends[phase] - start
        # A phase may have no steps: the fall, for example, if `pct_start` is 1.
        progress = min(1.0, (step - start) / length) if length > 0 else 1.0
        if self.anneal_strategy == "cos":
            return cosine(levels[phase], levels[phase + 1], progress)
        return levels[phase] * (1 - progress) + levels[phase + 1] * progress

    def _phases(self) -> tuple[list[float], list[float]]:
        """Return the last step of each phase; and the value at the start, and at the end of each phase."""
        up, last = self.pct_start * self.total_steps, self.total_steps - 1.0
        lowest = self.initial / self.final_div_factor
        if self.three_phase:
            return [up - 1, 2 * up - 2, last], [self.initial, self.peak, self.initial, lowest]
        return [up - 1, last], [self.initial, self.peak, lowest]

    @property
    def length(self) -> int:
        return self.total_steps
