"""Optimizers and schedulers from what a params file or a script says, in every public spelling.

A scheduler is spelled `{"scheduler": "Linear", "initial_learning_rate": 0.0, …}`, the older form, or
`{"LinearLR": {"initial_learning_rate": 0.0, …}}`, the newer one.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch.optim.optimizer import ParamsT

from headwater.core.errors import ConfigError
from headwater.optim import lr_scheduler, weight_decay_scheduler
from headwater.optim.arguments import check_names, nearest
from headwater.optim.catalog import constructor_of, find_optimizer
from headwater.optim.lr_scheduler import ChainedLR, ConstantLR, LRScheduler, ScalePerParamLR, SequentialLR
from headwater.optim.scheduler import (
    ChainedScheduler,
    ScalePerParamScheduler,
    Scheduler,
    Tags,
    Wrapper,
)
from headwater.optim.spec import OptimizerSpec

LearningRate = float | str | Mapping[str, Any] | Sequence[Mapping[str, Any]]
S = TypeVar("S", bound=Scheduler)

_ALIASES = {
    "steps": ("total_iters", "total_steps"),
    "decay_steps": ("total_iters",),
    "learning_rate": ("initial_learning_rate", "base_lr"),
    "values": ("learning_rates", "vals"),
    "boundaries": ("milestones",),
}
"""Older names of arguments of schedulers, and what each may stand for."""


def configure_optimizer(
    optimizer_type: str,
    params: ParamsT,
    **kwargs: Any,
) -> torch.optim.Optimizer:
    """An optimizer by name.

    Args:
        optimizer_type: its class name in `headwater.optim`; case does not count.
        params: parameters, named parameters or groups, as from `configure_param_groups`.
        kwargs: its arguments. `learning_rate` may be written for `lr`; where it is a schedule, the optimizer
            begins with its first value. `correct_bias` can only be true, and `adjust_learning_rate` is for
            `configure_param_groups`; both change nothing here.

    Raises:
        ConfigError: if there is no such optimizer or argument, or a value is out of its range.
    """
    name = find_optimizer(optimizer_type, exact_case=False).__name__
    if kwargs.pop("correct_bias", True) is not True:
        raise ConfigError(f"{name} always corrects its bias", remedy="remove correct_bias, or set it to true")
    kwargs.pop("adjust_learning_rate", None)
    rate = kwargs.pop("learning_rate", None)
    if rate is not None and "lr" in kwargs:
        raise ConfigError(f"{name} got lr and learning_rate", remedy="give one of them")
    check_names(kwargs, [key for key in constructor_of(find_optimizer(name)) if key != "params"], name)
    arguments = {key: _number(value) for key, value in kwargs.items()}
    if isinstance(rate, float | int | str):
        arguments["lr"] = _number(rate)
    optimizer = OptimizerSpec(name, arguments).build(params)
    if rate is not None and "lr" not in arguments:
        configure_lr_scheduler(optimizer, rate)  # sets the value of step 0
    return optimizer


def configure_lr_scheduler(
    optimizer: torch.optim.Optimizer,
    learning_rate: LearningRate | None,
    adjust_learning_rate: Mapping[str, float] | None = None,
) -> LRScheduler | None:
    """A learning-rate scheduler; call its `step()` after each step of the optimizer.

    `amp.optimizer_step` does it for a loop that does not.

    Args:
        optimizer: whose rate it sets, to that of step 0 at once.
        learning_rate: a number, which stays; a scheduler in either spelling; or a list of schedulers, each of
            which takes over when the one before it has ended, or that are multiplied if they say
            `main_scheduler: chained`. `None` gives no scheduler.
        adjust_learning_rate: what `configure_param_groups` made factors of; if there is any, each parameter
            group's rate is scaled by its own.

    Raises:
        ConfigError: if a scheduler or an argument is unknown, missing or out of its range.
    """
    if learning_rate is None:
        return None
    if isinstance(learning_rate, float | int | str):
        scheduler: LRScheduler = ConstantLR(optimizer, learning_rate)
    elif isinstance(learning_rate, Mapping):
        scheduler = _build(optimizer, learning_rate, LRScheduler, None)
    else:
        scheduler = _combined(optimizer, learning_rate)
    if adjust_learning_rate:
        scheduler = ScalePerParamLR(optimizer, scheduler)
    _configured[optimizer] = weakref.ref(scheduler)
    return scheduler


_configured: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[LRScheduler]] = (
    weakref.WeakKeyDictionary()
)


def configured_lr_scheduler(optimizer: torch.optim.Optimizer) -> LRScheduler | None:
    """What `configure_lr_scheduler` last made for this optimizer, while it lives."""
    scheduler = _configured.get(optimizer)
    return None if scheduler is None else scheduler()


def configure_scheduler(
    optimizer: torch.optim.Optimizer, scheduler: Mapping[str, Any], *, param_group_tags: Tags = None
) -> Scheduler:
    """One scheduler, of learning rate or weight decay, as an entry of a params file's `schedulers` spells it.

    Args:
        optimizer: whose parameter groups it changes.
        scheduler: its name with its arguments; those that hold others spell them in the same way.
        param_group_tags: which parameter groups, where `scheduler` does not say it.

    Raises:
        ConfigError: if a scheduler or an argument is unknown, missing or out of its range.
    """
    return _build(optimizer, scheduler, Scheduler, param_group_tags)


def _combined(optimizer: torch.optim.Optimizer, entries: Sequence[Mapping[str, Any]]) -> LRScheduler:
    """Several schedulers one after the other, or chained."""
    if not entries:
        raise ConfigError("learning_rate is an empty list", remedy="give at least one scheduler, or a number")
    parts = [_build(optimizer, entry, LRScheduler, None) for entry in entries]
    ways = {str(entry["main_scheduler"]).lower() for entry in entries if "main_scheduler" in entry}
    if not ways <= {"sequential", "sequentiallr", "chained", "chainedlr"} or len(ways) > 1:
        raise ConfigError(f"main_scheduler is {' and '.join(ways)}", remedy="write sequential or chained")
    if len(parts) == 1:
        return parts[0]
    return ChainedLR(parts) if ways & {"chained", "chainedlr"} else SequentialLR(optimizer, parts)


def _build(optimizer: torch.optim.Optimizer, entry: Mapping[str, Any], family: type[S], tags: Tags) -> S:
    name, given = _read(entry)
    kind = _find(name, family)
    arguments = {"param_group_tags": tags, **{_canonical(key, kind): value for key, value in given.items()}}
    if issubclass(kind, Wrapper):
        arguments = _with_parts(optimizer, kind, arguments, family)
    if not issubclass(kind, ChainedScheduler):  # which has that of its parts
        arguments["optimizer"] = optimizer
    return kind(**arguments)


def _with_parts(
    optimizer: torch.optim.Optimizer, kind: type[Wrapper], arguments: dict[str, Any], family: type[S]
) -> dict[str, Any]:
    """The arguments of a scheduler made of others, which are built."""
    check_names(arguments, kind.argument_names(), kind.__name__)
    single = issubclass(kind, ScalePerParamScheduler)
    key = "scheduler" if single else "schedulers"
    if not arguments.get(key):
        raise ConfigError(f"{kind.__name__} needs {key}", remedy="give what it is made of")
    entries = [arguments[key]] if single else arguments[key]
    parts = [_build(optimizer, entry, family, arguments["param_group_tags"]) for entry in entries]
    return {**arguments, key: parts[0] if single else parts}


def _read(entry: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Name and arguments of a scheduler in either spelling."""
    if not isinstance(entry, Mapping) or not entry:
        raise ConfigError(
            f"a scheduler is a mapping, found {entry!r}",
            remedy="write for example {scheduler: Linear, initial_learning_rate: 0.0, "
            "end_learning_rate: 0.001, total_iters: 100}",
        )
    if isinstance(entry.get("scheduler"), str):
        return entry["scheduler"], {
            key: value for key, value in entry.items() if key not in ("scheduler", "main_scheduler")
        }
    if len(entry) > 1:
        raise ConfigError(
            f"a scheduler has one name, found {', '.join(entry)}",
            remedy="write {scheduler: NAME, …} or {NAME: {…}}",
        )
    name, arguments = next(iter(entry.items()))
    return name, dict(arguments or {})


def _find(name: str, family: type[S]) -> type[S]:
    """The scheduler called `name`, with or without its suffix; case does not count."""
    known = {
        key.lower(): value
        for module in (lr_scheduler, weight_decay_scheduler)
        for key, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, family) and value.__module__ == module.__name__
    }
    found = known.get(f"{name.lower()}lr") or known.get(name.lower())
    if found is None:
        names = sorted({value.__name__ for value in known.values()})
        close = nearest(name, [*names, *(key.removesuffix("LR") for key in names)])
        listed = f"there are: {', '.join(names)}"
        raise ConfigError(
            f"there is no scheduler {name!r}", remedy=f"did you mean {close}? {listed}" if close else listed
        )
    return found


def _canonical(key: str, kind: type[Scheduler]) -> str:
    """The name of an argument of `kind` that `key` is, or is an older name of."""
    valid = kind.argument_names()
    return key if key in valid else next((name for name in _ALIASES.get(key, ()) if name in valid), key)


def _number(value: Any) -> Any:
    """Numbers that YAML reads as text (`1e-3`) as numbers, lists as tuples, and the rest as it is."""
    if isinstance(value, list | tuple):
        return tuple(map(_number, value))
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value
