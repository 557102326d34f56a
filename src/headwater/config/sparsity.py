"""The section `sparsity`: which weights are kept at zero, and when others take their place."""

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
        """The number by step."""
        value: schedules.Value = self.kind(**self.model_dump(exclude={"type"}))
        return value


class ConstantConfig(_ScheduleSection):
    """The same number at each step."""

    type: Literal["constant"]
    value: float

    kind: ClassVar[Any] = schedules.Constant


class LinearConfig(_ScheduleSection):
    """`init + slope · step`."""

    type: Literal["linear"]
    init: float
    slope: float

    kind: ClassVar[Any] = schedules.Linear


class ExponentialConfig(_ScheduleSection):
    """From `init` towards `final`, by `exp(-gamma)` in each step."""

    type: Literal["exp"]
    init: float
    gamma: float
    final: float = 1.0

    kind: ClassVar[Any] = schedules.Exponential


class PowerConfig(_ScheduleSection):
    """`init · beta ** step`."""

    type: Literal["power"]
    init: float
    beta: float

    kind: ClassVar[Any] = schedules.Power


class CosineConfig(_ScheduleSection):
    """Half a cosine from `init` to `minimum` over `half_period` steps."""

    type: Literal["cosine"]
    init: float
    half_period: float = Field(gt=0)
    minimum: float = 0.0

    kind: ClassVar[Any] = schedules.Cosine


class CubicConfig(_ScheduleSection):
    """From `init` at step `begin` to `final` at step `end`, fast at first."""

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
"""A number, or how it changes with the step."""


class CadenceConfig(Section):
    """Every `freq` steps, from step `start` on and before step `stop`."""

    freq: int = Field(ge=1)
    start: int = Field(default=0, ge=0)
    stop: int | None = Field(default=None, ge=1)


class SparsityConfig(Section):
    """How sparse the weights of some names are.

    Attributes:
        sparsity: share of the elements that are zero, a number or by step.
        algorithm: `static`; `gmp` prunes as `sparsity` grows; `set` and `rigl` exchange weights.
        init_method: how the first mask is made.
        drop_fraction: share of the weights that are exchanged, a number or by step.
        update: when masks change.
        param_filter: patterns of parameters' names, ours or those of the public Model Zoo.
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
            raise ValueError(f"{self.algorithm} needs update, the steps at which masks change")
        if self.algorithm in ("set", "rigl") and self.drop_fraction is None:
            raise ValueError(f"{self.algorithm} needs drop_fraction, the share of the weights to exchange")
        try:
            self.build()
        except ConfigError as error:
            raise ValueError(f"{error.what}: {error.remedy}") from None
        return self

    def build(self) -> Sparsity:
        """The same for the run."""
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
