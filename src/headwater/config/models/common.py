"""Types and sections that several model families share."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from headwater.config.base import Section

Nonlinearity = Literal[
    "gelu", "gelu_new", "quick_gelu", "relu", "squared_relu", "silu", "tanh",
    "swiglu", "geglu", "geglu_new", "reglu",
]  # fmt: skip
Rate = Annotated[float, Field(ge=0, lt=1)]
"""Dropout rate: the fraction of elements that are set to zero."""

InitializerName = Literal[
    "normal", "truncated_normal", "uniform", "xavier_normal", "xavier_uniform", "kaiming_uniform", "constant",
    "zeros", "ones", "variance_scaling",
]  # fmt: skip


class InitializerConfig(Section):
    """The initial distribution of a weight.

    Attributes:
        name: the distribution. `truncated_normal` is a normal distribution restricted to [`a`, `b`].
        mean: mean of `normal` and `truncated_normal`.
        std: standard deviation of `normal` and `truncated_normal`.
        a: lower bound of `uniform` (0 if absent) and `truncated_normal` (`mean - 2 std` if absent); negative
            slope of the leaky ReLU for `kaiming_uniform` (0 if absent).
        b: upper bound of `uniform` (1 if absent) and `truncated_normal` (`mean + 2 std` if absent).
        gain: factor on the standard deviation of `xavier_normal` and `xavier_uniform`.
        value: value of `constant`.
        scale: for `variance_scaling`, the variance is `scale` divided by the number that `mode` selects.
        mode: for `variance_scaling`, the number of inputs, the number of outputs, or their mean.
        distribution: distribution of `variance_scaling`. `truncated_normal` is cut at two standard
            deviations, and its variance is corrected for the cut.
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
        """Return the distribution with its standard deviation multiplied by `factor`."""
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
            raise ValueError(f"expected a <= b, found {low} and {high}")
        return self
