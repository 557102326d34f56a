"""What the model sections of several families have in common."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from headwater.config.base import Section

Nonlinearity = Literal[
    "gelu", "gelu_new", "quick_gelu", "relu", "squared_relu", "silu", "tanh",
    "swiglu", "geglu", "geglu_new", "reglu",
]  # fmt: skip
Rate = Annotated[float, Field(ge=0, lt=1)]
"""Share of elements that dropout zeroes."""

InitializerName = Literal[
    "normal", "truncated_normal", "uniform", "xavier_normal", "xavier_uniform", "kaiming_uniform", "constant",
    "zeros", "ones", "variance_scaling",
]  # fmt: skip


class InitializerConfig(Section):
    """How a weight is drawn at the start.

    Attributes:
        name: the distribution. `truncated_normal` draws from a normal and redraws outside [`a`, `b`].
        mean: of the normal ones.
        std: of the normal ones.
        a: lower bound of `uniform` and `truncated_normal` (there `mean - 2 std` where absent); of
            `kaiming_uniform` the slope of the leaky ReLU that it is for (0 where absent).
        b: upper bound, likewise.
        gain: factor on the spread of the `xavier_*` ones.
        value: what `constant` fills in.
        scale: of `variance_scaling`: the variance, times the number of inputs or outputs.
        mode: of `variance_scaling`: that number: inputs, outputs, or their mean.
        distribution: of `variance_scaling`. A `truncated_normal` ends at two standard deviations and is as
            wide as the others after that.
    """

    name: InitializerName
    mean: float = 0.0
    std: float = Field(default=1.0, ge=0)
    a: float | None = None
    b: float | None = None
    gain: float = 1.0
    value: float = 0.0
    scale: float = Field(default=1.0, ge=0)
    mode: Literal["fan_in", "fan_out", "fan_avg"] = "fan_in"
    distribution: Literal["truncated_normal", "normal", "uniform"] = "truncated_normal"

    @property
    def bounds(self) -> tuple[float, float]:
        """Lower and upper bound of `uniform` and `truncated_normal`."""
        if self.name == "uniform":
            low, high = 0.0, 1.0
        else:
            low, high = self.mean - 2 * self.std, self.mean + 2 * self.std
        return (low if self.a is None else self.a), (high if self.b is None else self.b)

    def scaled(self, factor: float) -> InitializerConfig:
        """The same distribution with its spread multiplied by `factor`."""
        if factor == 1:
            return self
        update: dict[str, float] = {"std": self.std * factor, "gain": self.gain * factor}
        update["scale"] = self.scale * factor**2
        if self.name in ("uniform", "truncated_normal"):
            low, high = self.bounds
            centre = self.mean if self.name == "truncated_normal" else (low + high) / 2
            update |= {"a": centre + (low - centre) * factor, "b": centre + (high - centre) * factor}
        return self.model_copy(update=update)

    @model_validator(mode="after")
    def _bounds_in_order(self) -> Self:
        low, high = self.bounds
        if self.name != "kaiming_uniform" and low > high:
            raise ValueError(f"a ({low}) is above b ({high})")
        return self
