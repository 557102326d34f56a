"""The schema of the section `sparsity`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from headwater.config.base import OneOrMore, Reads, Section
from headwater.core.errors import ConfigError
from headwater.sparsity import schedules
from headwater.sparsity.sparsifier import Sparsity


class _ScheduleSection(Section):
    kind: ClassVar[Any]

    def build(self) -> schedules.Value:
        """Return the schedule: a function that returns the number for a step."""
        value: schedules.Value = self.kind(**self.model_dump(exclude={"type"}))
        return value


class ConstantConfig(_ScheduleSection):
    """A schedule with the same number at each step.

    Attributes:
        value: the number.
    """

    type: Literal["constant"]
    value: float

    kind: ClassVar[Any] = schedules.Constant


class LinearConfig(_ScheduleSection):
    """`init + slope · step`.

    Attributes:
        init: number of step 0.
        slope: change in one step.
    """

    type: Literal["linear"]
    init: float
    slope: float

    kind: ClassVar[Any] = schedules.Linear


class ExponentialConfig(_ScheduleSection):
    """An exponential approach: `final + (init - final) · exp(-gamma · step)`.

    Attributes:
        init: number of step 0.
        gamma: rate of the approach in one step.
        final: number that the schedule approaches.
    """

    type: Literal["exp"]
    init: float
    gamma: float
    final: float = 1.0

    kind: ClassVar[Any] = schedules.Exponential


class PowerConfig(_ScheduleSection):
    """`init · beta ** step`.

    Attributes:
        init: number of step 0.
        beta: factor on the number in each step.
    """

    type: Literal["power"]
    init: float
    beta: float

    kind: ClassVar[Any] = schedules.Power


class CosineConfig(_ScheduleSection):
    """Half a cosine from `init` to `minimum` over `half_period` steps.

    Attributes:
        init: number of step 0.
        half_period: number of steps from `init` to `minimum`.
        minimum: smallest number.
    """

    type: Literal["cosine"]
    init: float
    half_period: float = Field(gt=0)
    minimum: float = 0.0

    kind: ClassVar[Any] = schedules.Cosine


class CubicConfig(_ScheduleSection):
    """A cubic from `init` at step `begin` to `final` at step `end`.

    Attributes:
        init: number until step `begin`.
        final: number from step `end` on.
        begin: first step of the change.
        end: last step of the change.
    """

    type: Literal["cubic"]
    init: float = 0.0
    final: float
    begin: int = Field(default=0, ge=0)
    end: int = Field(ge=1)

    kind: ClassVar[Any] = schedules.Cubic


def _number(value: Any) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return {"type": "constant", "value": float(value)} if is_number else value


ByStep = Annotated[
    ConstantConfig | LinearConfig | ExponentialConfig | PowerConfig | CosineConfig | CubicConfig,
    Field(discriminator="type"),
    Reads(_number, lambda schema: {"anyOf": [{"type": "number"}, schema]}),
]
"""A number, or a schedule that gives a number for each step."""


class CadenceConfig(Section):
    """The steps at which masks change: multiples of `freq` from `start` to `stop`, without `stop` itself.

    Attributes:
        freq: steps between two changes.
        start: first step at which masks may change.
        stop: step from which on masks stay as they are; masks change until the end if absent.
    """

    freq: int = Field(ge=1)
    start: int = Field(default=0, ge=0)
    stop: int | None = Field(default=None, ge=1)


class SparsityConfig(Section):
    """The sparsity of a group of weights.

    Attributes:
        sparsity: fraction of the elements that are zero, a number or a schedule.
        algorithm: `static` keeps the first masks; `gmp` prunes as `sparsity` grows; `set` and `rigl` replace
            the smallest weights.
        init_method: how the first mask is chosen.
        drop_fraction: fraction of the weights to replace at each update, a number or a schedule.
        update: the steps at which masks change.
        param_filter: patterns of parameter names, as in Headwater's models or in the Cerebras Model Zoo.
    """

    sparsity: ByStep = ConstantConfig(type="constant", value=0.0)
    algorithm: Literal["static", "gmp", "set", "rigl"] = "static"
    init_method: Literal["random", "topk", "from_zeros", "checkerboard"] = "random"
    drop_fraction: ByStep | None = None
    update: CadenceConfig | None = None
    param_filter: Annotated[tuple[str, ...], OneOrMore] = ()

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.algorithm != "static" and self.update is None:
            raise ValueError(f"algorithm {self.algorithm} needs update, the steps at which masks change")
        if self.algorithm in ("set", "rigl") and self.drop_fraction is None:
            what = "drop_fraction, the fraction of the weights to replace"
            raise ValueError(f"algorithm {self.algorithm} needs {what}")
        # Here already, so that an error names the place in the file.
        try:
            self.build()
        except ConfigError as error:
            raise ValueError(f"{error.what}: {error.remedy}") from None
        return self

    def build(self) -> Sparsity:
        """Return the settings as an object for `Sparsifier`."""
        update = None
        if self.update is not None:
            update = schedules.Cadence(self.update.freq, self.update.start, self.update.stop)
        return Sparsity(
            sparsity=self.sparsity.build(),
            algorithm=self.algorithm,
            init_method=self.init_method,
            drop_fraction=None if self.drop_fraction is None else self.drop_fraction.build(),
            update=update,
            param_filter=self.param_filter,
        )
