"""Construction of optimizers and schedulers from the settings in a params file or a script.

A scheduler has two forms: `{"scheduler": "Linear", "initial_learning_rate": 0.0, …}` (older), and
`{"LinearLR": {"initial_learning_rate": 0.0, …}}` (newer).
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch.optim.optimizer import ParamsT

from headwater.core.errors import ConfigError
from headwater.core.names import nearest
from headwater.optim import lr_scheduler, weight_decay_scheduler
from headwater.optim.arguments import check_names
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
"""Older names of scheduler arguments, with the current names that each may mean."""


def configure_optimizer(
    optimizer_type: str,
    params: ParamsT,
    **kwargs: Any,
) -> torch.optim.Optimizer:
    """Construct an optimizer by name.

    Args:
        optimizer_type: class name in `headwater.optim`, in any case.
        params: parameters, named parameters or groups, as from `configure_param_groups`.
        kwargs: arguments of the optimizer. `learning_rate` is accepted for `lr`; if it is a schedule, the
            optimizer starts with its first value. `correct_bias` must be true, and `adjust_learning_rate` is
            read by `configure_param_groups`; neither has an effect here.

    Raises:
        ConfigError: if the optimizer or an argument is unknown, or a value is out of its range.
    """
    name = find_optimizer(optimizer_type, exact_case=False).__name__
    if kwargs.pop("correct_bias", True) is not True:
        raise ConfigError(
            f"{name} does not support correct_bias: false", remedy="remove correct_bias, or set it to true"
        )
    kwargs.pop("adjust_learning_rate", None)
    rate = kwargs.pop("learning_rate", None)
    if rate is not None and "lr" in kwargs:
        raise ConfigError(f"{name} got both lr and learning_rate", remedy="write only one of them")
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
    """Construct a learning-rate scheduler. Call its `step()` after each step of the optimizer.

    `amp.optimizer_step` calls it for loops that do not.

    Args:
        optimizer: the optimizer whose learning rate is scheduled. The rate of step 0 is set at once.
        learning_rate: a number (constant rate), a scheduler in either form, or a list of schedulers. Those
            of a list run one after the other, or are multiplied if one of them has
            `main_scheduler: chained`.
        adjust_learning_rate: the mapping that `configure_param_groups` turned into factors. If it is not
            empty, each parameter group's rate is multiplied by the group's factor.

    Returns:
        The scheduler, or `None` if `learning_rate` is `None`.

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


# The values are weak too: a scheduler refers to its optimizer, so it would keep its own key alive.
_configured: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[LRScheduler]] = (
    weakref.WeakKeyDictionary()
)


def configured_lr_scheduler(optimizer: torch.optim.Optimizer) -> LRScheduler | None:
    """Return the last scheduler that `configure_lr_scheduler` made for this optimizer, or `None`.

    Only a weak reference is kept: `None` is also returned after the scheduler was deleted.
    """
    scheduler = _configured.get(optimizer)
    return None if scheduler is None else scheduler()


def configure_scheduler(
    optimizer: torch.optim.Optimizer, scheduler: Mapping[str, Any], *, param_group_tags: Tags = None
) -> Scheduler:
    """Construct a scheduler of learning rate or weight decay from an entry of a params file's `schedulers`.

    Args:
        optimizer: the optimizer whose parameter groups the scheduler changes.
        scheduler: name and arguments, in either form; nested schedulers are written in the same way.
        param_group_tags: tags of the parameter groups to change, unless `scheduler` has its own.

    Raises:
        ConfigError: if a scheduler or an argument is unknown, missing or out of its range.
    """
    return _build(optimizer, scheduler, Scheduler, param_group_tags)


def _combined(optimizer: torch.optim.Optimizer, entries: Sequence[Mapping[str, Any]]) -> LRScheduler:
    """Construct a sequence of schedulers, or their product if they are chained."""
    if not entries:
        raise ConfigError(
            "learning_rate is an empty list", remedy="write a number, or at least one scheduler"
        )
    parts = [_build(optimizer, entry, LRScheduler, None) for entry in entries]
    ways = {str(entry["main_scheduler"]).lower() for entry in entries if "main_scheduler" in entry}
    if not ways <= {"sequential", "sequentiallr", "chained", "chainedlr"} or len(ways) > 1:
        raise ConfigError(
            f"expected main_scheduler to be sequential or chained, got {' and '.join(ways)}",
            remedy="write one of them in the first entry",
        )
    if len(parts) == 1:
        return parts[0]
    return ChainedLR(parts) if ways & {"chained", "chainedlr"} else SequentialLR(optimizer, parts)


def _build(optimizer: torch.optim.Optimizer, entry: Mapping[str, Any], family: type[S], tags: Tags) -> S:
    name, given = _read(entry)
    kind = _find(name, family)
    arguments = {"param_group_tags": tags, **{_canonical(key, kind): value for key, value in given.items()}}
    if issubclass(kind, Wrapper):
        arguments = _with_parts(optimizer, kind, arguments, family)
    if not issubclass(kind, ChainedScheduler):  # a chain takes the optimizer from its parts
        arguments["optimizer"] = optimizer
    return kind(**arguments)


def _with_parts(
    optimizer: torch.optim.Optimizer, kind: type[Wrapper], arguments: dict[str, Any], family: type[S]
) -> dict[str, Any]:
    """Construct the schedulers among the arguments of a combined scheduler; return its arguments."""
    # Combined schedulers have plain constructors, which would raise `TypeError` for an unknown argument.
    check_names(arguments, kind.argument_names(), kind.__name__)
    single = issubclass(kind, ScalePerParamScheduler)
    key = "scheduler" if single else "schedulers"
    if not arguments.get(key):
        raise ConfigError(f"{kind.__name__} needs the argument {key}", remedy=f"add {key}: …")
    entries = [arguments[key]] if single else arguments[key]
    parts = [_build(optimizer, entry, family, arguments["param_group_tags"]) for entry in entries]
    return {**arguments, key: parts[0] if single else parts}


def _read(entry: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return name and arguments of a scheduler: `{scheduler: NAME, …}` or `{NAME: {…}}`."""
    if not isinstance(entry, Mapping) or not entry:
        raise ConfigError(
            f"expected a scheduler to be a mapping, got {entry!r}",
            remedy="write for example {scheduler: Linear, initial_learning_rate: 0.0, "
            "end_learning_rate: 0.001, total_iters: 100}",
        )
    if isinstance(entry.get("scheduler"), str):
        return entry["scheduler"], {
            key: value for key, value in entry.items() if key not in ("scheduler", "main_scheduler")
        }
    if len(entry) > 1:
        raise ConfigError(
            f"expected one name of a scheduler, got {', '.join(entry)}",
            remedy="write {scheduler: NAME, …} or {NAME: {…}}",
        )
    name, arguments = next(iter(entry.items()))
    return name, dict(arguments or {})


def _find(name: str, family: type[S]) -> type[S]:
    """Return the scheduler class called `name`, in any case, with or without the suffix `LR`."""
    # Without imported classes: these are bases, which set no option.
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
        listed = f"available: {', '.join(names)}"
        raise ConfigError(
            f"unknown scheduler {name!r}", remedy=f"did you mean {close}? {listed}" if close else listed
        )
    return found


def _canonical(key: str, kind: type[Scheduler]) -> str:
    """Return the current name of the argument `key` of `kind`; `key` itself if it is unknown."""
    valid = kind.argument_names()
    return key if key in valid else next((name for name in _ALIASES.get(key, ()) if name in valid), key)


def _number(value: Any) -> Any:
    """Convert text to a number where possible (YAML reads `1e-3` as text), and lists to tuples."""
    if isinstance(value, list | tuple):
        return tuple(map(_number, value))
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value
