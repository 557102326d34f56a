"""What the `optimizer:` and `schedulers:` sections may say, and what they mean."""

from __future__ import annotations

import abc
import itertools
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from headwater.config.base import AsTuple, Choice, OneOrMore, Section
from headwater.optim import OptimizerSpec, is_bias_or_norm
from headwater.optim.schedules import (
    Constant,
    CosineAnnealing,
    CosineDecay,
    Exponential,
    InverseSquareRootDecay,
    Linear,
    MultiStep,
    Polynomial,
    Schedule,
    Sequential,
    Step,
)

Beta = Annotated[float, Field(ge=0, lt=1)]


class TaggedParamsConfig(Section):
    """Parameters that have a schedule of their own.

    Attributes:
        params: patterns of their names, ours or those of the public Model Zoo.
        tag: what schedules call them.
    """

    params: Annotated[tuple[str, ...], Field(min_length=1), OneOrMore]
    tag: str


class OptimizerSection(Section):
    """What every optimizer takes.

    Attributes:
        learning_rate: a constant rate, for a run without `schedulers`.
        weight_decay: of every parameter but biases and those of normalization layers.
        adjust_learning_rate: factor on the rate of parameters, by a pattern of their names, or `embedding` or
            `decoder_kernel`; with a `ScalePerParamLR`.
        params: tags of parameters, for schedules with `param_group_tags`.
    """

    learning_rate: float | None = Field(default=None, ge=0)
    weight_decay: float = Field(default=0.0, ge=0)
    adjust_learning_rate: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    params: Annotated[tuple[TaggedParamsConfig, ...], OneOrMore] = ()

    def kwargs(self) -> dict[str, Any]:
        """Arguments of the optimizer in `torch.optim`, the learning rate apart."""
        return self.model_dump(exclude={"learning_rate", "correct_bias", "adjust_learning_rate", "params"})


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
    """Adafactor (arXiv:1804.04235) as `torch.optim` has it.

    Attributes:
        beta2_decay: exponent of the decay of the second moment.
        eps: added to the squared gradient, and least scale of the rate.
        d: clips the update.
    """

    beta2_decay: float = Field(default=-0.8, le=0)
    eps: Annotated[tuple[float | None, float], AsTuple] = (None, 1e-3)
    d: float = Field(default=1.0, ge=1)


class AdamLikeConfig(OptimizerSection):
    """Adamax, NAdam or RAdam."""

    betas: Annotated[tuple[Beta, Beta], AsTuple] = (0.9, 0.999)
    eps: float = Field(default=1e-8, ge=0)


class LambConfig(AdamLikeConfig):
    """Lamb (arXiv:1904.00962)."""

    eps: float = Field(default=1e-6, ge=0)


class LionConfig(OptimizerSection):
    """Lion (arXiv:2302.06675)."""

    betas: Annotated[tuple[Beta, Beta], AsTuple] = (0.9, 0.99)


class RMSpropConfig(OptimizerSection):
    """RMSprop."""

    alpha: Beta = 0.99
    eps: float = Field(default=1e-8, ge=0)
    momentum: float = Field(default=0.0, ge=0)
    centered: bool = False


class AdagradConfig(OptimizerSection):
    """Adagrad."""

    lr_decay: float = Field(default=0.0, ge=0)
    initial_accumulator_value: float = Field(default=0.0, ge=0)
    eps: float = Field(default=1e-10, ge=0)


class AdadeltaConfig(OptimizerSection):
    """Adadelta."""

    rho: Beta = 0.9
    eps: float = Field(default=1e-6, ge=0)


class OptimizerConfig(Choice):
    """Which optimizer: its name with its arguments."""

    AdamW: AdamConfig | None = None
    Adam: AdamConfig | None = None
    SGD: SGDConfig | None = None
    Adafactor: AdafactorConfig | None = None
    Adamax: AdamLikeConfig | None = None
    NAdam: AdamLikeConfig | None = None
    RAdam: AdamLikeConfig | None = None
    Lamb: LambConfig | None = None
    Lion: LionConfig | None = None
    RMSprop: RMSpropConfig | None = None
    Adagrad: AdagradConfig | None = None
    Adadelta: AdadeltaConfig | None = None

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


Tags = Annotated[tuple[str, ...], OneOrMore]


class ScheduleSection(Section, abc.ABC):
    """What every schedule takes.

    Attributes:
        total_iters: the steps until it ends, which the one after it begins at.
        param_group_tags: the parameters that it is for; all where absent.
    """

    total_iters: int | None = Field(default=None, ge=0)
    param_group_tags: Tags = ()

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


class WeightDecayConfig(ScheduleSection):
    """From one weight decay to another."""

    initial_val: float = Field(ge=0)
    end_val: float = Field(ge=0)
    total_iters: int = Field(ge=0)


class LinearWeightDecayConfig(WeightDecayConfig):
    """A straight line from one weight decay to another."""

    def build(self) -> Schedule:
        return Linear(self.initial_val, self.end_val, self.total_iters)


class CosineWeightDecayConfig(WeightDecayConfig):
    """Half a cosine from one weight decay to another."""

    def build(self) -> Schedule:
        return CosineDecay(self.initial_val, self.end_val, self.total_iters)


class ConstantWeightDecayConfig(ScheduleSection):
    """The same weight decay at every step."""

    val: float = Field(ge=0)

    def build(self) -> Schedule:
        return Constant(self.val)


class PolynomialConfig(RampSection):
    """A line bent by a power."""

    power: float = Field(default=1.0, ge=0)
    cycle: bool = False

    def build(self) -> Schedule:
        rates = (self.initial_learning_rate, self.end_learning_rate)
        return Polynomial(*rates, self.total_iters, self.power, self.cycle)


class DecaySection(ScheduleSection):
    """What the schedules that begin with a rate and decay from there take."""

    initial_learning_rate: float = Field(ge=0)


class ExponentialConfig(DecaySection):
    """A power of `decay_rate`."""

    total_iters: int = Field(ge=1)
    decay_rate: float = Field(ge=0)
    staircase: bool = False

    def build(self) -> Schedule:
        return Exponential(self.initial_learning_rate, self.total_iters, self.decay_rate, self.staircase)


class InverseSquareRootDecayConfig(ScheduleSection):
    """`scale` over the root of the step, constant for the first steps."""

    initial_learning_rate: float = Field(default=1.0, ge=0)
    scale: float = Field(default=1.0, ge=0)
    warmup_steps: int = Field(default=1, ge=1)

    def build(self) -> Schedule:
        return InverseSquareRootDecay(self.initial_learning_rate, self.scale, self.warmup_steps)


class CosineAnnealingConfig(DecaySection):
    """A cosine without end, of period `2 * T_max`."""

    T_max: int = Field(ge=1)
    eta_min: float = Field(default=0.0, ge=0)

    def build(self) -> Schedule:
        return CosineAnnealing(self.initial_learning_rate, self.T_max, self.eta_min)


class StepConfig(DecaySection):
    """Times `gamma` every `step_size` steps."""

    step_size: int = Field(ge=1)
    gamma: float = Field(ge=0)

    def build(self) -> Schedule:
        return Step(self.initial_learning_rate, self.step_size, self.gamma)


class MultiStepConfig(DecaySection):
    """Times `gamma` at each milestone."""

    gamma: float = Field(ge=0)
    milestones: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1), AsTuple]

    @model_validator(mode="after")
    def _increasing(self) -> Self:
        if list(self.milestones) != sorted(set(self.milestones)):
            raise ValueError("milestones increase")
        return self

    def build(self) -> Schedule:
        return MultiStep(self.initial_learning_rate, self.gamma, self.milestones)


class SequentialConfig(Section):
    """One schedule after another. The milestones follow from `total_iters` and need not be given."""

    schedulers: Annotated[tuple[SimpleScheduleConfig, ...], Field(min_length=1), AsTuple]
    param_group_tags: Tags = ()
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
    PolynomialLR: PolynomialConfig | None = None
    ExponentialLR: ExponentialConfig | None = None
    InverseSquareRootDecayLR: InverseSquareRootDecayConfig | None = None
    CosineAnnealingLR: CosineAnnealingConfig | None = None
    StepLR: StepConfig | None = None
    MultiStepLR: MultiStepConfig | None = None

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
    ScalePerParamLR: ScalePerParamConfig | None = None
    ConstantWD: ConstantWeightDecayConfig | None = None
    LinearWD: LinearWeightDecayConfig | None = None
    CosineDecayWD: CosineWeightDecayConfig | None = None

    @property
    def option(self) -> str:
        """The option of the optimizer that it sets: `lr` or `weight_decay`."""
        is_decay = isinstance(self.chosen, WeightDecayConfig | ConstantWeightDecayConfig)
        return "weight_decay" if is_decay else "lr"

    @property
    def tags(self) -> tuple[str, ...]:
        """Of the parameters that it is for; none: for all."""
        chosen = self.ScalePerParamLR.scheduler.chosen if self.ScalePerParamLR else self.chosen
        tags: tuple[str, ...] = getattr(chosen, "param_group_tags", ())
        return tags

    def build(self) -> Schedule:
        return (self.ScalePerParamLR or self.SequentialLR or self.schedule).build()


class ScalePerParamConfig(Section):
    """A schedule that is scaled for each parameter by the optimizer's `adjust_learning_rate`."""

    scheduler: ScheduleConfig

    def build(self) -> Schedule:
        return self.scheduler.build()
