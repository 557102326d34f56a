"""Which optimizer a run uses, as plain data that can build it for any part of a model."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from headwater.core.errors import ConfigError

_FUSED = {
    "cpu": frozenset({"Adam", "AdamW", "SGD", "Adagrad"}),
    "cuda": frozenset({"Adam", "AdamW", "SGD"}),
}
"""Optimizers of torch with a fused kernel, by device."""

_ELEMENTWISE = frozenset({
    "SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop",
})  # fmt: skip

_REFUSED = {
    "LBFGS": "it calls the model several times a step and needs all gradients at once",
    "SparseAdam": "it takes sparse gradients, and the weight store keeps dense ones",
}


def is_elementwise(name: str) -> bool:
    """Whether the update of an element depends on the gradient and state of that element alone.

    Such an update may be applied to any piece of a parameter, in any order.
    """
    return name in _ELEMENTWISE


def is_bias_or_norm(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a parameter is a bias or belongs to a normalization layer, neither of which should decay.

    Told by the name and by having at most one dimension, which holds for every normalization layer of torch.
    """
    return "bias" in name or len(shape) <= 1


@dataclasses.dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer of `torch.optim` by name, with its arguments.

    Attributes:
        name: class name in `torch.optim`.
        kwargs: its arguments; `lr` is the rate it starts with.
        no_decay: which parameters, by name and shape, get no weight decay.
        lr_scale: factor on the learning rate of each parameter, by name (muP).

    Raises:
        ConfigError: if torch has no such optimizer, or streaming cannot serve it.
    """

    name: str
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    no_decay: Callable[[str, tuple[int, ...]], bool] | None = None
    lr_scale: Callable[[str], float] | None = None

    def __post_init__(self) -> None:
        if self.name in _REFUSED:
            raise ConfigError(
                f"{self.name} cannot be used here: {_REFUSED[self.name]}", remedy="use for example AdamW"
            )
        if self.name not in _optimizers():
            close = difflib.get_close_matches(self.name, _optimizers(), n=1)
            known = "there are: " + ", ".join(sorted(_optimizers()))
            raise ConfigError(
                f"torch.optim has no optimizer {self.name!r}",
                remedy=f"did you mean {close[0]}? {known}" if close else known,
            )

    @property
    def elementwise(self) -> bool:
        return is_elementwise(self.name)

    def options(
        self, name: str, shape: tuple[int, ...], step_options: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """What differs from `kwargs` for the parameter called `name`.

        Args:
            name: qualified name of the parameter.
            shape: its shape.
            step_options: what differs for every parameter at this step, `lr` above all.
        """
        options = dict(step_options or {})
        scale = self.lr_scale(name) if self.lr_scale is not None else 1.0
        rate = options.get("lr", self.kwargs.get("lr"))
        if scale != 1.0 and rate is not None:
            options["lr"] = rate * scale
        if self.no_decay is not None and self.kwargs.get("weight_decay") and self.no_decay(name, shape):
            options["weight_decay"] = 0.0
        return options

    def groups(self, named_params: Iterable[tuple[str, torch.nn.Parameter]]) -> list[dict[str, Any]]:
        """Parameter groups for `build`, one for each set of options, in order of first appearance."""
        groups: dict[tuple[tuple[str, Any], ...], list[torch.nn.Parameter]] = {}
        for name, param in named_params:
            key = tuple(sorted(self.options(name, tuple(param.shape)).items()))
            groups.setdefault(key, []).append(param)
        return [{"params": params, **dict(key)} for key, params in groups.items()]

    def build(self, params: list[torch.nn.Parameter] | list[dict[str, Any]]) -> torch.optim.Optimizer:
        """The optimizer over `params` (parameters or groups), with torch's fused kernel where there is one.

        Raises:
            ConfigError: if the optimizer does not take one of the arguments.
        """
        kwargs = dict(self.kwargs)
        if "foreach" not in kwargs and self.name in _FUSED.get(_device(params), frozenset()):
            kwargs.setdefault("fused", True)
        try:
            return _optimizers()[self.name](params, **kwargs)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{self.name} cannot be built: {error}", remedy="correct the optimizer's arguments"
            ) from error


def _optimizers() -> dict[str, Callable[..., torch.optim.Optimizer]]:
    base = torch.optim.Optimizer
    return {
        name: cls
        for name, cls in vars(torch.optim).items()
        if isinstance(cls, type) and issubclass(cls, base) and cls is not base
    }


def _device(params: list[torch.nn.Parameter] | list[dict[str, Any]]) -> str:
    first = params[0] if params else None
    if isinstance(first, dict):
        first = next(iter(first["params"]), None)
    return first.device.type if first is not None else "cpu"
