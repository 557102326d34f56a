"""Optimizers whose steps run in the user's loop, because a weight store cannot run them.

[Note: steps in the loop]
A weight store updates one parameter at a time, with an object that was built from the options of the user's
optimizer. Some classes need more: a norm over all parameters, a count on the object, the value of the loss.
Their `step` runs as the user wrote it. It reads and writes each parameter in the store, as any other code of
the loop does, and `optimizer.state` is an ordinary dictionary in host memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from headwater.api.optimizer_record import record_of
from headwater.api.stored_state import Optimizer
from headwater.core.errors import ConfigError
from headwater.fabric.membership import current
from headwater.optim.attributes import copied, is_same, own_attributes
from headwater.optim.catalog import is_known, refusal
from headwater.optim.probe import reads_variables
from headwater.optim.spec import OptimizerSpec


class LoopStepWarning(UserWarning):
    """Warns that an optimizer steps in the user's loop, with its state in host memory."""


def runs_in_loop(optimizer: Optimizer) -> bool:
    """True if the step of an optimizer must run in the user's loop; see [Note: steps in the loop].

    Raises:
        ConfigError: if the step must run in the loop, but there are several ranks.
    """
    record = record_of(optimizer)
    if record.runs_in_loop is not None:
        return record.runs_in_loop
    try:
        # Also fails for torch's AdamW, after a wrapper has added defaults to it.
        spec = OptimizerSpec.of(optimizer)
    except ConfigError as error:
        run_in_loop(optimizer, error)
        return True
    record.updates_at_once = spec.foreign_class is not None and reads_variables(
        spec.foreign_class, spec.kwargs.values()
    )
    record.runs_in_loop, record.attributes = False, copied(own_attributes(optimizer))
    return False


def leaves_store(optimizer: Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """True if an optimizer whose steps a store has run so far must step in the user's loop from now on.

    Args:
        optimizer: an optimizer for which `runs_in_loop` is false.
        args: the arguments of its `step`, without the optimizer itself.
        kwargs: its keyword arguments.

    Raises:
        ConfigError: if the step must run in the loop, but there are several ranks.
    """
    if is_known(type(optimizer)):
        return False
    try:
        _check_attributes(optimizer)
        _check_arguments(optimizer, {**dict(zip(("closure",), args, strict=False)), **kwargs}, len(args))
    except ConfigError as error:
        run_in_loop(optimizer, error)
        return True
    return False


def _check_attributes(optimizer: Optimizer) -> None:
    before, now = record_of(optimizer).attributes, own_attributes(optimizer)
    for name in sorted(before.keys() | now.keys()):
        if name not in before or name not in now or not is_same(before[name], now[name]):
            raise refusal(type(optimizer).__qualname__, f"its attribute {name!r} has changed")


def _check_arguments(optimizer: Optimizer, given: Mapping[str, Any], count: int) -> None:
    closure = given.get("closure")
    if given.keys() - {"closure"} or count > 1 or not (closure is None or callable(closure)):
        raise refusal(type(optimizer).__qualname__, "its step gets other arguments than a closure")
    record = record_of(optimizer)
    if closure is not None and not record.takes_closures:
        OptimizerSpec.of(optimizer).check_closure()
        record.takes_closures = True


def run_in_loop(optimizer: Optimizer, reason: ConfigError) -> None:
    """Record that the steps of an optimizer run in the loop from now on, and warn.

    Raises:
        ConfigError: `reason`, if there are several ranks.
    """
    if current().size > 1:
        raise reason
    record_of(optimizer).runs_in_loop = True
    what = reason.what.partition(" cannot be used here: ")[2] or reason.what
    warnings.warn(
        f"{type(optimizer).__qualname__} steps in your loop, not in the weight store ({what}); results are "
        "those of plain PyTorch, but its state is in host memory, the plan does not count it, and each "
        "operation of the step reads or writes whole parameters",
        LoopStepWarning,
        stacklevel=2,
    )
