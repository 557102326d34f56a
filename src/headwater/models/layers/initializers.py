"""Initial values of weights; each parameter has its own random stream."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from headwater.config.models.common import InitializerConfig, InitializerName
from headwater.core.seeding import derive_seed

Value = TypeVar("Value")

BIASES_AND_NORMS = (
    (r".*\bbias", InitializerConfig(name="zeros")),
    (r".*norm\.weight", InitializerConfig(name="ones")),
)
"""Rules for the initial values of biases and of the factors of normalization layers; see `first_match`."""

_TRUNCATED_STD = 0.87962566103423978
"""Standard deviation of a standard normal distribution truncated at -2 and 2."""

_Fill = Callable[[Tensor, InitializerConfig, torch.Generator], Tensor]


def _truncated_normal(value: Tensor, initializer: InitializerConfig, generator: torch.Generator) -> Tensor:
    """Fill `value` from a truncated normal distribution, with one random number per element.

    `nn.init.trunc_normal_` is 15 times slower: it draws the whole tensor again until no element is out of
    bounds.
    """
    mean, std, (low, high) = initializer.mean, initializer.std, initializer.bounds
    if std == 0:
        return value.fill_(min(max(mean, low), high))
    edges = (math.erf((bound - mean) / (std * math.sqrt(2))) for bound in (low, high))
    value.uniform_(*edges, generator=generator).erfinv_().mul_(std * math.sqrt(2)).add_(mean)
    # Rounding may bring a number beyond the bounds.
    return value.clamp_(low, high)


def _variance_scaling(value: Tensor, initializer: InitializerConfig, generator: torch.Generator) -> Tensor:
    """Fill `value` like the `VarianceScaling` initializer of Keras."""
    fan_in, fan_out = nn.init._calculate_fan_in_and_fan_out(value)
    fans = {"fan_in": fan_in, "fan_out": fan_out, "fan_avg": (fan_in + fan_out) / 2}
    std = math.sqrt(initializer.scale / max(1.0, fans[initializer.mode]))
    match initializer.distribution:
        case "normal":
            return nn.init.normal_(value, 0.0, std, generator)
        case "uniform":
            return nn.init.uniform_(value, -math.sqrt(3) * std, math.sqrt(3) * std, generator)
        case "truncated_normal":
            wider = InitializerConfig(name="truncated_normal", std=std / _TRUNCATED_STD)
            return _truncated_normal(value, wider, generator)


_FILLS: dict[InitializerName, _Fill] = {
    "normal": lambda t, c, g: nn.init.normal_(t, c.mean, c.std, g),
    "truncated_normal": _truncated_normal,
    "uniform": lambda t, c, g: nn.init.uniform_(t, *c.bounds, generator=g),
    "xavier_normal": lambda t, c, g: nn.init.xavier_normal_(t, c.gain, g),
    "xavier_uniform": lambda t, c, g: nn.init.xavier_uniform_(t, c.gain, g),
    "kaiming_uniform": lambda t, c, g: nn.init.kaiming_uniform_(t, c.a or 0.0, generator=g).mul_(c.gain),
    "constant": lambda t, c, g: nn.init.constant_(t, c.value),
    "zeros": lambda t, c, g: nn.init.zeros_(t),
    "ones": lambda t, c, g: nn.init.ones_(t),
    "variance_scaling": _variance_scaling,
}


def first_match(name: str, rules: Iterable[tuple[str, Value]]) -> Value | None:
    """Return the value of the first rule whose pattern matches the whole name; `None` if no rule does.

    Args:
        name: qualified name of a parameter.
        rules: pairs of a regular expression and a value.
    """
    return next((value for pattern, value in rules if re.fullmatch(pattern, name)), None)


def draw(
    name: str, shape: Sequence[int], initializer: InitializerConfig, seed: int, *, rows: Sequence[int] = ()
) -> Tensor:
    """Return the initial value of a parameter, fp32 on the CPU.

    It depends only on the arguments, not on other parameters or on the order in which they are drawn.

    Args:
        name: qualified name of the parameter; selects its random stream.
        shape: shape of the parameter.
        initializer: distribution of the values.
        seed: seed of the run.
        rows: rows of each matrix, if several are stacked along the first dimension; fan-in and fan-out are
            those of each matrix. By default all rows are one matrix.
    """
    generator = torch.Generator().manual_seed(derive_seed(seed, "init", name))
    # On the CPU under any default device: the values must be the same on all devices.
    value = torch.empty(*shape, device="cpu", dtype=torch.float32)
    for part in value.split(list(rows)) if rows else (value,):
        _FILLS[initializer.name](part, initializer, generator)
    return value


@torch.no_grad()
def initialize(model: nn.Module, initial: Callable[[str, torch.Size], Tensor]) -> None:
    """Set the parameters of `model` to their initial values; skip those on the meta device.

    Args:
        model: model whose weights are overwritten.
        initial: returns the value of a parameter from its name and shape.
    """
    for name, parameter in model.named_parameters():
        if not parameter.is_meta:
            parameter.copy_(initial(name, parameter.shape))
