"""The facts that this package records about each optimizer, in one table for the process.

The table is global because torch's hooks are: a step of an optimizer finds its record by the optimizer alone.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, final

import torch
from torch.utils.hooks import RemovableHandle

if TYPE_CHECKING:
    from headwater.store.store import WeightStore


@final
@dataclasses.dataclass(eq=False)
class OptimizerRecord:
    """The facts about one optimizer. All of them are lost with the optimizer, and a copy begins without them.

    Attributes:
        runs_in_loop: true if its steps run in the user's loop, false if a weight store runs them; `None` if
            its class was not tested yet.
        updates_at_once: true if the store must run its updates before `step` returns, because its code reads
            variables that the script may change afterwards.
        attributes: its attributes when its class was tested; empty for a class of torch, which needs no test.
        takes_closures: true if a weight store can run its steps although they get a closure.
        state: refers to the mapping in `optimizer.state` that shows the states in stores; `None` if no such
            mapping was installed.
        has_file_hooks: true if `state_dict` and `load_state_dict` have the hooks that include these states.
        step_hooks: the hooks around its last step.
        stepping: the stores to which its running step was committed.
    """

    runs_in_loop: bool | None = None
    updates_at_once: bool = False
    attributes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    takes_closures: bool = False
    state: weakref.ref[Any] | None = None
    has_file_hooks: bool = False
    step_hooks: tuple[RemovableHandle, ...] = ()
    stepping: list[WeightStore] = dataclasses.field(default_factory=list)


_records: weakref.WeakKeyDictionary[torch.optim.Optimizer, OptimizerRecord] = weakref.WeakKeyDictionary()


def record_of(optimizer: torch.optim.Optimizer) -> OptimizerRecord:
    """Return the record of an optimizer."""
    record = _records.get(optimizer)
    if record is None:
        record = _records[optimizer] = OptimizerRecord()
    return record


def is_state_replaced(optimizer: torch.optim.Optimizer) -> bool:
    """True if the user has replaced the mapping that this package had assigned to `optimizer.state`."""
    installed = record_of(optimizer).state
    return installed is not None and installed() is not optimizer.state
