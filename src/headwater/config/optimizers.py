"""The schema of the sections `optimizer` and `schedulers`, and their conversion to specs and schedules."""

from __future__ import annotations

import abc
import itertools
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from headwater.config.base import AsTuple, Choice, OneOrMore, Section
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
from headwater.optim.spec import OptimizerSpec, is_bias_or_norm

Beta = Annotated[float, Field(ge=0, lt=1)]


class TaggedParamsConfig(Section):
    """A tag for a group of parameters, which schedules can refer to.

    Attributes:
        params: patterns of parameter names, as in Headwater's models or in the Cerebras Model Zoo.
        tag: name of the group, for `param_group_tags` of schedules.
    """

    params: Annotated[tuple[str, ...], Field(min_length=1), OneOrMore]
    tag: str


class OptimizerSection(Section):
    """The keys of every optimizer.

    Attributes:
        learning_rate: constant learning rate, for a run without `schedulers`.
        weight_decay: weight decay of all parameters except biases and parameters of normalization layers.
        adjust_learning_rate: factors on the learning rate of parameters, by a pattern of their names, or by
            `embedding` or `decoder_kernel`; needs a `ScalePerParamLR`.
        params: tags of groups of parameters, for schedules with `param_group_tags`.
    """

    learning_rate: float | None = Field(default=None, ge=0)
    weight_decay: float = Field(default=0.0, ge=0)
    adjust_learning_rate: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    params: Annotated[tuple[TaggedParamsConfig, ...], OneOrMore] = ()

    def kwargs(self) -> dict[str, Any]:
        """Return the arguments for the optimizer's class, without the learning rate."""
        return self.model_dump(exclude={"learning_rate", "correct_bias", "adjust_learning_rate", "params"})


class AdamConfig(OptimizerSection):
    """Adam or AdamW.

    Attributes:
        betas: decay rates of the moving averages of the gradient and of its square.
        amsgrad: divide by the largest second moment so far.
        correct_bias: must be true, because torch always corrects the bias of the averages.
    """

    betas: Annotated[tuple[Beta, Beta], AsTuple] = (0.9, 0.999)
    eps: float = Field(default=1e-8, ge=0)
    amsgrad: bool = False
    correct_bias: Literal[True] = True


class SGDConfig(OptimizerSection):
    """Stochastic gradient descent, optionally with momentum.

    Attributes:
        momentum: decay rate of the moving sum of gradients; 0 for none.
        dampening: fraction of each gradient that is not added to this sum.
        nesterov: use Nesterov's momentum.
    """

    momentum: float = Field(default=0.0, ge=0)
    dampening: float = 0.0
    nesterov: bool = False

    @model_validator(mode="after")
    def _nesterov_needs_momentum(self) -> Self:
        if self.nesterov and (self.momentum == 0 or self.dampening != 0):
            raise ValueError("nesterov needs momentum > 0 and dampening 0")
        return self


class AdafactorConfig(OptimizerSection):
    """Adafactor (arXiv:1804.04235) as in `torch.optim`.

    Attributes:
        beta2_decay: exponent of the decay of the second moment.
        eps: number added to the squared gradient, and lower bound of the scale of the learning rate.
        d: threshold at which the update is clipped.
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
    """RMSprop.

    Attributes:
        alpha: decay rate of the moving average of the squared gradient.
        momentum: decay rate of the moving sum of steps; 0 for none.
        centered: divide by the estimated standard deviation instead of the root mean square.
    """

    alpha: Beta = 0.99
    eps: float = Field(default=1e-8, ge=0)
    momentum: float = Field(default=0.0, ge=0)
    centered: bool = False


class AdagradConfig(OptimizerSection):
    """Adagrad.

    Attributes:
        lr_decay: decay of the learning rate with the number of steps.
        initial_accumulator_value: first value of the sum of squared gradients.
    """

    lr_decay: float = Field(default=0.0, ge=0)
    initial_accumulator_value: float = Field(default=0.0, ge=0)
    eps: float = Field(default=1e-10, ge=0)


class AdadeltaConfig(OptimizerSection):
    """Adadelta.

    Attributes:
        rho: decay rate of the moving averages.
    """

    rho: Beta = 0.9
    eps: float = Field(default=1e-6, ge=0)


class OptimizerConfig(Choice):
    """An optimizer: its name with its arguments."""

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
            raise ValueError("expected the name of an optimizer, found none")
        return self

    @property
    def name(self) -> str:
        return next(key for key, name in self.attributes().items() if getattr(self, name) is not None)

    @property
    def arguments(self) -> OptimizerSection:
        chosen = self.chosen
        assert isinstance(chosen, OptimizerSection), "the validator has checked that one is chosen"
        return chosen

    def spec(self, learning_rate: float) -> OptimizerSpec:
        """Return the spec of the optimizer with an initial learning rate."""
        kwargs = {"lr": learning_rate, **self.arguments.kwargs()}
        return OptimizerSpec(self.name, kwargs, no_decay=is_bias_or_norm)


Tags = Annotated[tuple[str, ...], OneOrMore]


class ScheduleSection(Section, abc.ABC):
    """The keys of every schedule.

    Attributes:
        total_iters: number of steps; in a sequence the next schedule starts after them.
        param_group_tags: tags of the parameters to which the schedule applies; all parameters if absent.
    """

    total_iters: int | None = Field(default=None, ge=0)
    param_group_tags: Tags = ()

    @abc.abstractmethod
    def build(self) -> Schedule:
        """Return the schedule as a function of the step."""


class ConstantConfig(ScheduleSection):
    """The same rate at every step.

    Attributes:
        learning_rate: the rate.
    """

    learning_rate: float = Field(ge=0)

    def build(self) -> Schedule:
        return Constant(self.learning_rate)


class RampSection(ScheduleSection):
    """The keys of schedules from one learning rate to another."""

    initial_learning_rate: float = Field(ge=0)
    end_learning_rate: float = Field(ge=0)
    total_iters: int = Field(ge=0)


class LinearConfig(RampSection):
    """A linear change of the learning rate."""

    def build(self) -> Schedule:
        return Linear(self.initial_learning_rate, self.end_learning_rate, self.total_iters)


class CosineDecayConfig(RampSection):
    """Half a cosine from one learning rate to another."""

    def build(self) -> Schedule:
        return CosineDecay(self.initial_learning_rate, self.end_learning_rate, self.total_iters)


class WeightDecayConfig(ScheduleSection):
    """The keys of schedules from one weight decay to another."""

    initial_val: float = Field(ge=0)
    end_val: float = Field(ge=0)
    total_iters: int = Field(ge=0)


class LinearWeightDecayConfig(WeightDecayConfig):
    """A linear change of the weight decay."""

    def build(self) -> Schedule:
        return Linear(self.initial_val, self.end_val, self.total_iters)


class CosineWeightDecayConfig(WeightDecayConfig):
    """Half a cosine from one weight decay to another."""

    def build(self) -> Schedule:
        return CosineDecay(self.initial_val, self.end_val, self.total_iters)


class ConstantWeightDecayConfig(ScheduleSection):
    """The same weight decay at every step.

    Attributes:
        val: the weight decay.
    """

    val: float = Field(ge=0)

    def build(self) -> Schedule:
        return Constant(self.val)


class PolynomialConfig(RampSection):
    """A decay by a power of the remaining fraction of steps.

    Attributes:
        power: exponent of the fraction; 1 is a linear decay.
        cycle: start again with a longer decay after `total_iters` steps, instead of staying at the end.
    """

    power: float = Field(default=1.0, ge=0)
    cycle: bool = False

    def build(self) -> Schedule:
        rates = (self.initial_learning_rate, self.end_learning_rate)
        return Polynomial(*rates, self.total_iters, self.power, self.cycle)


class DecaySection(ScheduleSection):
    """The keys of schedules that start with a rate and decay without an end value."""

    initial_learning_rate: float = Field(ge=0)


class ExponentialConfig(DecaySection):
    """An exponential decay by the factor `decay_rate` per `total_iters` steps.

    Attributes:
        decay_rate: factor on the learning rate in `total_iters` steps.
        staircase: change the rate only every `total_iters` steps.
    """

    total_iters: int = Field(ge=1)
    decay_rate: float = Field(ge=0)
    staircase: bool = False

    def build(self) -> Schedule:
        return Exponential(self.initial_learning_rate, self.total_iters, self.decay_rate, self.staircase)


class InverseSquareRootDecayConfig(ScheduleSection):
    """A decay with the inverse square root of the step, constant for the first `warmup_steps` steps.

    Attributes:
        initial_learning_rate: factor on the rate.
        scale: further factor on the rate.
        warmup_steps: number of steps with the same rate.
    """

    initial_learning_rate: float = Field(default=1.0, ge=0)
    scale: float = Field(default=1.0, ge=0)
    warmup_steps: int = Field(default=1, ge=1)

    def build(self) -> Schedule:
        return InverseSquareRootDecay(self.initial_learning_rate, self.scale, self.warmup_steps)


class CosineAnnealingConfig(DecaySection):
    """A periodic cosine with a period of `2 * T_max` steps.

    Attributes:
        T_max: number of steps from the highest rate to the lowest.
        eta_min: lowest rate.
    """

    T_max: int = Field(ge=1)
    eta_min: float = Field(default=0.0, ge=0)

    def build(self) -> Schedule:
        return CosineAnnealing(self.initial_learning_rate, self.T_max, self.eta_min)


class StepConfig(DecaySection):
    """A multiplication of the rate by `gamma` every `step_size` steps.

    Attributes:
        step_size: number of steps with the same rate.
        gamma: factor on the rate.
    """

    step_size: int = Field(ge=1)
    gamma: float = Field(ge=0)

    def build(self) -> Schedule:
        return Step(self.initial_learning_rate, self.step_size, self.gamma)


class MultiStepConfig(DecaySection):
    """A multiplication of the rate by `gamma` at each milestone.

    Attributes:
        gamma: factor on the rate.
        milestones: steps at which the rate changes.
    """

    gamma: float = Field(ge=0)
    milestones: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1), AsTuple]

    @model_validator(mode="after")
    def _increasing(self) -> Self:
        if list(self.milestones) != sorted(set(self.milestones)):
            raise ValueError(f"milestones must be strictly increasing, found {list(self.milestones)}")
        return self

    def build(self) -> Schedule:
        return MultiStep(self.initial_learning_rate, self.gamma, self.milestones)


class SequentialConfig(Section):
    """A sequence of schedules.

    Attributes:
        schedulers: the schedules, in order.
        param_group_tags: tags of the parameters to which the sequence applies; all parameters if absent.
        milestones: steps at which the next schedule starts; they follow from `total_iters` if absent.
    """

    schedulers: Annotated[tuple[SimpleScheduleConfig, ...], Field(min_length=1), AsTuple]
    param_group_tags: Tags = ()
    milestones: Annotated[tuple[int, ...], AsTuple] | None = None

    @model_validator(mode="after")
    def _milestones_follow(self) -> Self:
        if any(entry.schedule.total_iters is None for entry in self.schedulers[:-1]):
            raise ValueError("a schedule in a sequence lacks total_iters, which only the last one may omit")
        if self.milestones not in (None, self.switches):
            found, expected = list(self.milestones or ()), list(self.switches)
            raise ValueError(f"expected milestones {expected}, the sums of total_iters, found {found}")
        return self

    @property
    def switches(self) -> tuple[int, ...]:
        """The steps at which the next schedule starts."""
        lengths = (entry.schedule.total_iters or 0 for entry in self.schedulers[:-1])
        return tuple(itertools.accumulate(lengths))

    def build(self) -> Schedule:
        return Sequential(tuple(entry.schedule.build() for entry in self.schedulers), self.switches)


class SimpleScheduleConfig(Choice):
    """A schedule that can be part of a sequence: its name with its arguments."""

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
            raise ValueError("expected the name of a schedule, found none")
        return self

    @property
    def schedule(self) -> ScheduleSection:
        chosen = self.chosen
        assert isinstance(chosen, ScheduleSection), "the validator has checked that one is chosen"
        return chosen

    def build(self) -> Schedule:
        return self.schedule.build()


class ScheduleConfig(SimpleScheduleConfig):
    """A schedule: its name with its arguments."""

    SequentialLR: SequentialConfig | None = None
    ScalePerParamLR: ScalePerParamConfig | None = None
    ConstantWD: ConstantWeightDecayConfig | None = None
    LinearWD: LinearWeightDecayConfig | None = None
    CosineDecayWD: CosineWeightDecayConfig | None = None

    @property
    def option(self) -> str:
        """The optimizer's option that the schedule sets: `lr` or `weight_decay`."""
        is_decay = isinstance(self.chosen, WeightDecayConfig | ConstantWeightDecayConfig)
        return "weight_decay" if is_decay else "lr"

    @property
    def tags(self) -> tuple[str, ...]:
        """Tags of the parameters to which the schedule applies; empty for all parameters."""
        chosen = self.ScalePerParamLR.scheduler.chosen if self.ScalePerParamLR else self.chosen
        tags: tuple[str, ...] = getattr(chosen, "param_group_tags", ())
        return tags

    def build(self) -> Schedule:
        return (self.ScalePerParamLR or self.SequentialLR or self.schedule).build()


class ScalePerParamConfig(Section):
    """A schedule whose rate is multiplied by each parameter's factor in `adjust_learning_rate`."""

    scheduler: ScheduleConfig

    def build(self) -> Schedule:
        return self.scheduler.build()
