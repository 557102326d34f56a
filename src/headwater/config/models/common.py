"""Types and sections that several model families share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import Field, model_validator

from headwater.config.base import NoEffect, Section

Value = TypeVar("Value")

Nonlinearity = Literal[
    "gelu", "gelu_new", "quick_gelu", "relu", "squared_relu", "silu", "tanh",
    "swiglu", "geglu", "geglu_new", "reglu",
]  # fmt: skip
Rate = Annotated[float, Field(ge=0, lt=1)]
"""Dropout rate: the fraction of elements that are set to zero."""

SoftmaxInFP32 = Annotated[bool, NoEffect("the softmax is always in fp32")]
AttentionKernel = Annotated[str | None, NoEffect("torch chooses the kernel")]
ConvolvedPatches = Annotated[
    bool, NoEffect("a convolution of non-overlapping patches is the same matrix product")
]

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


def first_given(value: Value | None, default: Value) -> Value:
    """Return `value`, or `default` if it is absent."""
    return default if value is None else value


def growth(size: float, base: float | None) -> float:
    """Return `size / base`, the growth from the muP base (arXiv:2203.03466); 1 if `base` is not given."""
    return size / (base or size)


def mup_logits_scale(alpha: float | None, width: float, base: float | None) -> float:
    """Return the factor on the logits; 1 without muP.

    Args:
        alpha: further factor with muP; 1 if absent.
        width: width of the model.
        base: width at which the hyperparameters were tuned; absent without muP.
    """
    return 1.0 if base is None else first_given(alpha, 1.0) / growth(width, base)


def attention_scale(kind: Literal["scaled_dot_product", "dot_product"], head_size: int) -> float:
    """Return the factor on the product of query and key; `dot_product` does not divide by √head_size."""
    return 1.0 if kind == "dot_product" else head_size**-0.5


def check_heads(hidden_size: int, num_heads: int, key: str = "hidden_size") -> None:
    """Raise if the heads cannot share the width equally.

    Args:
        hidden_size: width of all heads together.
        num_heads: number of heads.
        key: key of the width, for the error.

    Raises:
        ValueError: if `hidden_size` is not a multiple of `num_heads`.
    """
    if hidden_size % num_heads:
        raise ValueError(f"{key} ({hidden_size}) is not a multiple of num_heads ({num_heads})")


def check_both_or_none(section: Section, first: str, second: str) -> None:
    """Raise if only one of two keys has a value.

    Args:
        section: the section.
        first: one of the keys.
        second: the other key.

    Raises:
        ValueError: if only one of them has a value.
    """
    given = [key for key in (first, second) if getattr(section, key) is not None]
    if len(given) == 1:
        raise ValueError(f"expected both or none of {first} and {second}, found only {given[0]}")


def with_defaults(data: Any, families: Mapping[str, Mapping[str, Any]], name: str | None = None) -> Any:
    """Return a section before validation, with the defaults of its family for the keys that it lacks.

    Args:
        data: the section; anything but a mapping is returned as it is.
        families: defaults of keys, by the family's name.
        name: the family of a section without a name.
    """
    if not isinstance(data, dict):
        return data
    return {**families.get(str(data.get("name", name)), {}), **data}
