"""Which optimizer a run uses, as plain data that can build it for any part of a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from headwater.core.errors import ConfigError
from headwater.optim.catalog import (
    FUSED,
    OptimizerClass,
    constructor_of,
    find_optimizer,
    is_elementwise,
    optimizers,
    refusal,
)
from headwater.optim.eager import eager
from headwater.optim.probe import check_streamable

_HOW = frozenset({"capturable", "differentiable", "foreach", "fused"})
"""Arguments of torch's optimizers that say how to compute, not what."""


def is_bias_or_norm(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a parameter is a bias or belongs to a normalization layer, neither of which should decay.

    Told by the name and by having at most one dimension.
    """
    return "bias" in name or len(shape) <= 1


@dataclasses.dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer by name or class, with its arguments.

    Attributes:
        name: class name in `torch.optim` or `headwater.optim`; of another class, what to call it.
        kwargs: its arguments; `lr` is the rate it starts with.
        no_decay: which parameters, by name and shape, get no weight decay.
        lr_scale: factor on the learning rate of each parameter, by name (muP).
        foreign_class: the class, if it is neither torch's nor Headwater's.

    Raises:
        ConfigError: if there is no such optimizer, or streaming cannot serve it.
    """

    name: str
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    no_decay: Callable[[str, tuple[int, ...]], bool] | None = None
    lr_scale: Callable[[str], float] | None = None
    foreign_class: OptimizerClass | None = None

    def __post_init__(self) -> None:
        if self.foreign_class is None:
            find_optimizer(self.name)
        else:
            check_streamable(self.name, self.build)

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, device: str = "cpu") -> OptimizerSpec:
        """The spec that builds optimizers like `optimizer`, with the options that its groups have by default.

        What differs between its groups, or is changed later, `group_options` gives. On CPU the implementation
        is the one that plain PyTorch runs for the same arguments: a loop over parameters by default. For a
        GPU the default is the fused kernel where torch has one: the store updates weights on the CPU, so it
        cannot have the bits of torch's default on a GPU.

        Args:
            optimizer: of the user.
            device: type of the device on which the model computes.

        Raises:
            ConfigError: if streaming cannot serve it.
        """
        kind = type(optimizer)
        if kind.__module__.startswith("torch.optim."):
            find_optimizer(kind.__name__)  # refuses what cannot be streamed
        known = optimizers().get(kind.__name__) is kind
        name = kind.__name__ if known else f"{kind.__module__}.{kind.__qualname__}"
        kwargs = _arguments(optimizer)
        if known and device == "cpu" and name in FUSED["cpu"] and not kwargs.keys() & {"foreach", "fused"}:
            kwargs |= {"foreach": False, "fused": False}
        spec = cls(name, kwargs, foreign_class=None if known else kind)
        spec._check_same_defaults(optimizer)
        return spec

    def with_numbers(self) -> OptimizerSpec:
        """Return the spec with numbers instead of tensors, which fake tensors cannot be compared with."""
        if not any(isinstance(each, torch.Tensor | tuple | list) for each in self.kwargs.values()):
            return self
        kwargs = {key: numbers(value) for key, value in self.kwargs.items()}
        return dataclasses.replace(self, kwargs=kwargs)

    @property
    def elementwise(self) -> bool:
        """Whether the update may be applied to any piece of a parameter; not known of a foreign class."""
        return self.foreign_class is None and is_elementwise(self.name)

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

    def build(self, params: ParamsT, *, to_compile: bool = True) -> torch.optim.Optimizer:
        """The optimizer over `params`, with torch's fused kernel where there is one.

        Args:
            params: parameters, named parameters or groups of either.
            to_compile: whether somebody may compile its steps, or ask for its class; otherwise torch's or
                Headwater's is an `eager` one.

        Raises:
            ConfigError: if the optimizer does not take one of the arguments, or not these parameters.
        """
        kwargs = dict(self.kwargs)
        make: Callable[..., torch.optim.Optimizer] = self.foreign_class or find_optimizer(self.name)
        if self.foreign_class is None and not to_compile:
            make = eager(find_optimizer(self.name))
        try:
            listed = [_with_list(entry) for entry in params]
            fused = self.foreign_class is None and self.name in FUSED.get(_device(listed), frozenset())
            if fused and "foreach" not in kwargs:
                kwargs.setdefault("fused", True)
            return make(listed, **kwargs)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{self.name} cannot be built: {error}", remedy="correct the optimizer's arguments"
            ) from error

    def _check_same_defaults(self, optimizer: torch.optim.Optimizer) -> None:
        """Check that what `build` makes has the options of `optimizer`."""
        wanted = _what(optimizer.defaults)
        rebuilt = _what(self.build([torch.nn.Parameter(torch.zeros(2, 2))], to_compile=False).defaults)
        for key, value in wanted.items():
            if rebuilt.get(key) != value:
                why = f"its option {key!r} is no argument of that name: it cannot be built again"
                raise refusal(self.name, why)


def group_options(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of one of the optimizer's parameter groups, as `UpdateRule.apply` takes them.

    What the optimizer does not read (tags, names, factors) is left out. Tensors are copied, since a scheduler
    changes them in place; they stay tensors, since optimizers compute with them in their own dtype.
    """
    return _what({key: group[key] for key in optimizer.defaults if key in group})


def numbers(value: Any) -> Any:
    """Return an option with numbers instead of tensors."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    return tuple(map(numbers, value)) if isinstance(value, tuple | list) else value


def state_signature(options: Mapping[str, Any]) -> Hashable:
    """Return what decides, of the options of a parameter group, which state tensors an optimizer keeps.

    Optimizers ask whether a number is zero (`momentum`), and not how large it is. So a schedule of the number
    leaves the signature as it is. No optimizer asks this of `lr`.
    """
    return tuple((key, _kind(value)) for key, value in sorted(options.items()) if key != "lr")


def _kind(value: Any) -> Hashable:
    if isinstance(value, tuple | list):
        return tuple(map(_kind, value))
    if isinstance(value, int | float | torch.Tensor):
        return bool(numbers(value))
    return str(value) if value is None or isinstance(value, str) else type(value).__qualname__


def _what(options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _plain(value) for key, value in options.items() if key not in _HOW}


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    return tuple(map(_plain, value)) if isinstance(value, tuple | list) else value


def _arguments(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The defaults of the optimizer that its constructor takes.

    Raises:
        ConfigError: if the constructor needs more than them.
    """
    parameters = constructor_of(type(optimizer))
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in {"params", *optimizer.defaults}:
            why = f"its argument {name!r} is not among its defaults: it cannot be built again"
            raise refusal(type(optimizer).__qualname__, why)
    given = {key: value for key, value in _what(optimizer.defaults).items() if key in parameters}
    chosen = {key: optimizer.defaults.get(key) for key in ("foreach", "fused")}
    return given | {key: value for key, value in chosen.items() if value is not None}


def _with_list(entry: Any) -> Any:
    """A group with its parameters in a list, so that they can be looked at; anything else as it is."""
    if isinstance(entry, dict) and not isinstance(entry["params"], torch.Tensor):
        return {**entry, "params": list(entry["params"])}
    return entry


def _device(params: list[Any]) -> str:
    """The type of device that one of the parameters is on: those of an optimizer are on one."""
    first = params[0] if params else None
    while isinstance(first, dict | list | tuple) and first:
        first = first["params"] if isinstance(first, dict) else first[-1]
    return first.device.type if isinstance(first, torch.Tensor) else "cpu"
