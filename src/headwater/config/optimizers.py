"""What the `optimizer:` and `schedulers:` sections may say, and what they mean."""

from __future__ import annotations

import abc
import itertools
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from headwater.config.base import AsTuple, Choice, Section
from headwater.optim import (
    Constant,
    CosineDecay,
    Linear,
    OptimizerSpec,
    Schedule,
    Sequential,
    is_bias_or_norm,
)
from headwater.optim.schedules import InverseSquareRootDecay

Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerSection(Section):
    """What every optimizer takes.

    Attributes:
        learning_rate: a constant rate, for a run without `schedulers`.
        weight_decay: of every parameter but biases and those of normalization layers.
    """

    learning_rate: float | None = Field(default=None, ge=0)
    weight_decay: float = Field(default=0.0, ge=0)

    def kwargs(self) -> dict[str, Any]:
        """Arguments of the optimizer in `torch.optim`, the learning rate apart."""
        return self.model_dump(exclude={"learning_rate", "correct_bias"})


class AdamConfig(OptimizerSection):
    """Adam or AdamW. `correct_bias` can only be true: torch always corrects."""

    betas: Annotated[tuple[Beta, Beta], AsTuple] = (0.9, 0.999)
    eps: float = Field(default=1e-8, ge=0)
    amsgrad: bool = False
    correct_bias: Literal[True] = True


class SGDConfig(OptimizerSection):
    """Stochastic gradient descent, with momentum where it is given."""

    momentum: float = Field(default=0.0, ge=0)
    dampening: float = 0.0
    nesterov: bool = False

    @model_validator(mode="after")
    def _nesterov_needs_momentum(self) -> Self:
        if self.nesterov and (self.momentum == 0 or self.dampening != 0):
            raise ValueError("nesterov needs a momentum above 0 and no dampening")
        return self


class AdafactorConfig(OptimizerSection):
    """Adafactor (arXiv:1804.04235).

    Attributes:
        beta2_decay: exponent of the step in the decay of the second moments, negative.
        eps: what is added to squared gradients, by the dtype where null; and the least size that an update is
            relative to.
        d: root mean square above which an update is clipped.
    """

    beta2_decay: float = Field(default=-0.8, le=0)
    eps: Annotated[tuple[Annotated[float, Field(ge=0)] | None, Annotated[float, Field(ge=0)]], AsTuple] = (
        None,
        1e-3,
    )
    d: float = Field(default=1.0, ge=1)


class OptimizerConfig(Choice):
    """Which optimizer: its name with its arguments."""

    AdamW: AdamConfig | None = None
    Adam: AdamConfig | None = None
    SGD: SGDConfig | None = None
    Adafactor: AdafactorConfig | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        if self.chosen is None:
            raise ValueError("no optimizer is named")
        return self

    @property
    def name(self) -> str:
        return next(key for key, name in self.attributes().items() if getattr(self, name) is not None)

    @property
    def arguments(self) -> OptimizerSection:
        chosen = self.chosen
        assert isinstance(chosen, OptimizerSection), "a validator saw to it that there is one"
        return chosen

    def spec(self, learning_rate: float) -> OptimizerSpec:
        """The optimizer, starting with `learning_rate`."""
        kwargs = {"lr": learning_rate, **self.arguments.kwargs()}
        return OptimizerSpec(self.name, kwargs, no_decay=is_bias_or_norm)


class ScheduleSection(Section, abc.ABC):
    """What every schedule takes: the steps until it ends, which the one after it begins at."""

    total_iters: int | None = Field(default=None, ge=0)

    @abc.abstractmethod
    def build(self) -> Schedule:
        """The schedule as a function of the step."""


class ConstantConfig(ScheduleSection):
    """The same rate at every step."""

    learning_rate: float = Field(ge=0)

    def build(self) -> Schedule:
        return Constant(self.learning_rate)


class RampSection(ScheduleSection):
    """What the schedules that lead from one rate to another take."""

    initial_learning_rate: float = Field(ge=0)
    end_learning_rate: float = Field(ge=0)
    total_iters: int = Field(ge=0)


class LinearConfig(RampSection):
    """A straight line."""

    def build(self) -> Schedule:
        return Linear(self.initial_learning_rate, self.end_learning_rate, self.total_iters)


class CosineDecayConfig(RampSection):
    """Half a cosine."""

    def build(self) -> Schedule:
        return CosineDecay(self.initial_learning_rate, self.end_learning_rate, self.total_iters)


class InverseSquareRootDecayConfig(ScheduleSection):
    """A rate that falls with the root of the step, after `warmup_steps` at one rate (arXiv:1910.10683)."""

    initial_learning_rate: float = Field(default=1.0, ge=0)
    scale: float = Field(default=1.0, ge=0)
    warmup_steps: int = Field(default=1, ge=1)

    def build(self) -> Schedule:
        return InverseSquareRootDecay(self.initial_learning_rate, self.scale, self.warmup_steps)


class SequentialConfig(Section):
    """One schedule after another. The milestones follow from `total_iters` and need not be given."""

    schedulers: Annotated[tuple[SimpleScheduleConfig, ...], AsTuple] = Field(min_length=1)
    milestones: Annotated[tuple[int, ...], AsTuple] | None = None

    @model_validator(mode="after")
    def _milestones_follow(self) -> Self:
        if any(entry.schedule.total_iters is None for entry in self.schedulers[:-1]):
            raise ValueError("every schedule but the last needs total_iters")
        if self.milestones not in (None, self.switches):
            found, expected = list(self.milestones or ()), list(self.switches)
            raise ValueError(f"milestones {found} do not follow from total_iters, which gives {expected}")
        return self

    @property
    def switches(self) -> tuple[int, ...]:
        """The steps at which the next schedule takes over."""
        lengths = (entry.schedule.total_iters or 0 for entry in self.schedulers[:-1])
        return tuple(itertools.accumulate(lengths))

    def build(self) -> Schedule:
        return Sequential(tuple(entry.schedule.build() for entry in self.schedulers), self.switches)


class SimpleScheduleConfig(Choice):
    """Which schedule, where it is part of another: its name with its arguments."""

    LinearLR: LinearConfig | None = None
    CosineDecayLR: CosineDecayConfig | None = None
    ConstantLR: ConstantConfig | None = None
    InverseSquareRootDecayLR: InverseSquareRootDecayConfig | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        if self.chosen is None:
            raise ValueError("no schedule is named")
        return self

    @property
    def schedule(self) -> ScheduleSection:
        chosen = self.chosen
        assert isinstance(chosen, ScheduleSection), "a validator saw to it that there is one"
        return chosen

    def build(self) -> Schedule:
        return self.schedule.build()


class ScheduleConfig(SimpleScheduleConfig):
    """Which schedule: its name with its arguments."""

    SequentialLR: SequentialConfig | None = None

    def build(self) -> Schedule:
        return (self.SequentialLR or self.schedule).build()
