"""A description of an optimizer as plain data, from which it can be constructed for any parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch.optim.optimizer import ParamsT

from headwater.core.effects import state_of_methods
from headwater.core.errors import ConfigError
from headwater.core.modes import apart_from_modes
from headwater.core.python_state import undone
from headwater.optim.attributes import copied, is_same, own_attributes
from headwater.optim.catalog import (
    FUSED,
    OptimizerClass,
    constructor_of,
    find_optimizer,
    is_elementwise,
    is_known,
    refusal,
    takes_any_option,
)
from headwater.optim.eager import eager
from headwater.optim.probe import check_closure, check_streamable

_IMPLEMENTATION_OPTIONS = frozenset({"capturable", "differentiable", "foreach", "fused"})
"""Arguments of torch's optimizers that select an implementation of the same formula."""

_NO_OPTIONS = frozenset({"params", "param_names", "initial_lr"})
"""Entries of a parameter group that torch itself adds."""


def is_bias_or_norm(name: str, shape: tuple[int, ...]) -> bool:
    """True if a parameter is a bias or belongs to a normalization layer, and should not get weight decay.

    The test is: the name contains `bias`, or the parameter has at most one dimension.
    """
    return "bias" in name or len(shape) <= 1


UpdateKind = Literal["fused", "pieces", "whole"]
"""How an optimizer updates: by a fused kernel, by other kernels on pieces of parameters, or whole parameters.

Each needs more memory beside the weights than the one before.
"""


@dataclasses.dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer by name or class, with its arguments.

    Attributes:
        name: class name in `torch.optim` or `headwater.optim`; for another class, a name for messages.
        kwargs: arguments of the constructor; `lr` is the initial learning rate.
        no_decay: true for the parameters, by name and shape, that get no weight decay.
        lr_scale: returns the factor on the learning rate of a parameter, by name (muP).
        foreign_class: the class, if it is neither torch's nor Headwater's.
        shared: attributes of the user's optimizer whose value is one object for all optimizers of the class,
            as they were when the spec was made. They may change before an update runs.

    Raises:
        ConfigError: if the optimizer is unknown, or cannot update one parameter at a time.
    """

    name: str
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    no_decay: Callable[[str, tuple[int, ...]], bool] | None = None
    lr_scale: Callable[[str], float] | None = None
    foreign_class: OptimizerClass | None = None
    shared: dict[str, Any] = dataclasses.field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        if self.foreign_class is None:
            find_optimizer(self.name)
        else:
            check_streamable(self.name, self.build, self.foreign_class, self.kwargs.values())

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, device: str = "cpu") -> OptimizerSpec:
        """Return the spec of the user's optimizer, with the defaults of its parameter groups.

        Options that differ between groups, or change later, are not part of the spec: see `group_options`. On
        a CPU the spec selects the implementation that plain PyTorch runs for the same arguments: by default a
        loop over the parameters. For a model on a GPU the default is the fused kernel, if torch has one. The
        store updates weights on the CPU, so bit-identity with torch's default on a GPU is impossible anyway.

        Args:
            optimizer: the user's optimizer.
            device: type of the device on which the model computes.

        Raises:
            ConfigError: if the optimizer cannot update one parameter at a time.
        """
        kind = type(optimizer)
        if kind.__module__.startswith("torch.optim."):
            find_optimizer(kind.__name__)  # raises if it cannot stream
        known = is_known(kind)
        name = kind.__name__ if known else f"{kind.__module__}.{kind.__qualname__}"
        kwargs = _arguments(optimizer)
        if known and device == "cpu" and name in FUSED["cpu"] and not kwargs.keys() & {"foreach", "fused"}:
            kwargs |= {"foreach": False, "fused": False}
        with apart_from_modes():  # the caller may be in a forward under autocast
            spec = cls(name, kwargs, foreign_class=None if known else kind)
            spec._check_same_object(optimizer)
        return spec

    def check_closure(self) -> None:
        """Raise `ConfigError` if a step with a closure needs more than the gradients that it computes."""
        if self.foreign_class is not None:
            check_closure(self.name, self.build, self.foreign_class, self.kwargs.values())

    def with_numbers(self) -> OptimizerSpec:
        """Return the spec with numbers instead of tensors, which cannot be compared during a dry run."""
        if not any(isinstance(each, torch.Tensor | tuple | list) for each in self.kwargs.values()):
            return self
        kwargs = {key: numbers(value) for key, value in self.kwargs.items()}
        return dataclasses.replace(self, kwargs=kwargs)

    @property
    def elementwise(self) -> bool:
        """True if any slice of a parameter can be updated alone; False if the class is foreign to us."""
        return self.foreign_class is None and is_elementwise(self.name)

    def is_fused_on(self, device: str) -> bool:
        """True if updates on a type of device run in a fused kernel of torch."""
        # `foreach`, even False, is a choice of the implementation: `of` asks for torch's loop by it.
        chosen = bool(self.kwargs.get("fused", "foreach" not in self.kwargs))
        return chosen and self.foreign_class is None and self.name in FUSED.get(device, frozenset())

    def update_kind_on(self, device: str) -> UpdateKind:
        """Return how updates run on a type of device; see `UpdateKind`."""
        if self.is_fused_on(device):
            return "fused"
        return "pieces" if self.elementwise else "whole"

    def options(
        self, name: str, shape: tuple[int, ...], step_options: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the options in which one parameter differs from `kwargs`.

        Args:
            name: qualified name of the parameter.
            shape: shape of the parameter.
            step_options: options that differ from `kwargs` for all parameters at this step, such as `lr`.
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
        """Return parameter groups for `build`, one for each set of options, in order of first appearance."""
        groups: dict[tuple[tuple[str, Any], ...], list[torch.nn.Parameter]] = {}
        for name, param in named_params:
            key = tuple(sorted(self.options(name, tuple(param.shape)).items()))
            groups.setdefault(key, []).append(param)
        return [{"params": params, **dict(key)} for key, params in groups.items()]

    def build(self, params: ParamsT, *, to_compile: bool = True) -> torch.optim.Optimizer:
        """Construct the optimizer for `params`, by default with torch's fused kernel if it has one.

        Args:
            params: parameters, named parameters or groups of either.
            to_compile: true if the caller may compile its steps or check its class. Otherwise an optimizer
                of torch or Headwater is an `eager` subclass.

        Raises:
            ConfigError: if the optimizer does not accept one of the arguments, or these parameters.
        """
        kwargs = dict(self.kwargs)
        make: Callable[..., torch.optim.Optimizer] = self.foreign_class or find_optimizer(self.name)
        if self.foreign_class is None and not to_compile:
            make = eager(find_optimizer(self.name))
        try:
            listed = [_with_list(entry) for entry in params]
            if self.is_fused_on(_device(listed)):
                kwargs["fused"] = True
            optimizer = make(listed, **kwargs)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{self.name} cannot be built: {error}", remedy="correct the optimizer's arguments"
            ) from error
        vars(optimizer).update({name: copied(value) for name, value in self.shared.items()})
        return optimizer

    def _check_same_object(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise if an optimizer from `build` would not have the defaults and attributes of `optimizer`."""
        wanted = _formula_options(optimizer.defaults)
        # A matrix: Muon refuses parameters of other dimensions.
        matrix = torch.nn.Parameter(torch.zeros(2, 2, device="cpu"))
        foreign = self.foreign_class
        with undone(state_of_methods(foreign, self.kwargs.values())) if foreign else nullcontext():
            trial = self.build([matrix], to_compile=False)
        rebuilt = _formula_options(trial.defaults)
        for key, value in wanted.items():
            if not is_same(rebuilt.get(key), value):
                why = f"its option {key!r} is not an argument of its constructor, so it cannot be built again"
                raise refusal(self.name, why)
        if self.foreign_class is None:
            return
        built = own_attributes(trial)
        for key, value in own_attributes(optimizer).items():
            if key not in built or not is_same(value, built[key]):
                why = f"its attribute {key!r} is not determined by its defaults, so it cannot be built again"
                raise refusal(self.name, why)
            if built[key] is value and (now := copied(value)) is not value:
                self.shared[key] = now


NO_UPDATES = OptimizerSpec("SGD", {"lr": 0.0})
"""The optimizer of a model that is not updated; it has no state."""


def group_options(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of an optimizer's parameter group, as `UpdateRule.apply` expects them.

    Entries that the optimizer does not read (tags, names, factors) are dropped. A user's class may read any
    entry. Tensors, containers and objects of a user's class are copied, because they may change before the
    update runs. Tensors stay tensors, because optimizers compute with them in their dtype.
    """
    if is_known(type(optimizer)):
        return _formula_options({key: group[key] for key in optimizer.defaults if key in group})
    return _formula_options({key: value for key, value in group.items() if key not in _NO_OPTIONS})


def numbers(value: Any) -> Any:
    """Return an option with its one-element tensors converted to numbers."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    return tuple(map(numbers, value)) if isinstance(value, tuple | list) else value


def state_signature(options: Mapping[str, Any]) -> Hashable:
    """Return a key of `options`. With equal keys, an optimizer keeps the same state tensors.

    The state depends on whether a number such as `momentum` is zero, not on its size. So a schedule of the
    number does not change the key. `lr` never matters.
    """
    return tuple((key, _kind(value)) for key, value in sorted(options.items()) if key != "lr")


def _kind(value: Any) -> Hashable:
    if isinstance(value, tuple | list):
        return tuple(map(_kind, value))
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        return tuple(value.shape)
    if isinstance(value, int | float | torch.Tensor):
        return bool(numbers(value))
    return str(value) if value is None or isinstance(value, str) else type(value).__qualname__


def _formula_options(options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _plain(value) for key, value in options.items() if key not in _IMPLEMENTATION_OPTIONS}


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    return tuple(map(_plain, value)) if isinstance(value, tuple | list) else copied(value)


def _arguments(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the constructor arguments of an optimizer, as found in its defaults.

    Raises:
        ConfigError: if a required argument of the constructor is not among the defaults.
    """
    parameters = constructor_of(type(optimizer))
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in {"params", *optimizer.defaults}:
            why = f"its argument {name!r} is not among its defaults, so it cannot be built again"
            raise refusal(type(optimizer).__qualname__, why)
    options, takes_any = _formula_options(optimizer.defaults), takes_any_option(type(optimizer))
    given = {key: value for key, value in options.items() if takes_any or key in parameters}
    # Not part of the formula, but a kernel that the user has asked for must be the one that runs.
    chosen = {key: optimizer.defaults.get(key) for key in ("foreach", "fused")}
    return given | {key: value for key, value in chosen.items() if value is not None}


def _with_list(entry: Any) -> Any:
    """Return a parameter group with its parameters in a list, since an iterator can be read only once."""
    if isinstance(entry, dict) and not isinstance(entry["params"], torch.Tensor):
        return {**entry, "params": list(entry["params"])}
    return entry


def _device(params: list[Any]) -> str:
    """Return the device type of the first parameter; all parameters of an optimizer are on one device."""
    first = params[0] if params else None
    while isinstance(first, dict | list | tuple) and first:
        first = first["params"] if isinstance(first, dict) else first[-1]
    return first.device.type if isinstance(first, torch.Tensor) else "cpu"
