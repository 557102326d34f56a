"""Which optimizer updates each streamed parameter."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn

from headwater.api.machine import NO_UPDATES, optimizer_state_bytes
from headwater.optim.spec import OptimizerSpec
from headwater.store.rule import SeveralRules, UpdateRule

installed_states: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[Any]] = (
    weakref.WeakKeyDictionary()
)
"""The mapping by which `optimizer.state` shows what stores have, of each optimizer that has one."""


def is_state_replaced(optimizer: torch.optim.Optimizer) -> bool:
    """True if the user has assigned another mapping to `optimizer.state`."""
    return optimizer in installed_states and installed_states[optimizer]() is not optimizer.state


@dataclasses.dataclass(frozen=True)
class _Updated:
    """The optimizer of a parameter, and its options.

    Attributes:
        spec: the kind of optimizer.
        by: the optimizer, for as long as it lives.
    """

    spec: OptimizerSpec
    by: Callable[[], torch.optim.Optimizer | None]


class Updaters:
    """The optimizer of each parameter of a model, by the parameter's name.

    Args:
        device: returns the type of the device on which the model computes.
        entries: the optimizers that are known already.
    """

    def __init__(self, device: Callable[[], str], entries: Mapping[str, _Updated] | None = None) -> None:
        self._device = device
        self._entries = dict(entries or {})

    def note(self, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> set[str]:
        """Record that `optimizer` updates its parameters from now on.

        Args:
            optimizer: over any parameters.
            names: the name of each parameter of the model, by identity.

        Returns:
            The names of the parameters that it did not update before.
        """
        own = {names[id(p)] for group in optimizer.param_groups for p in group["params"] if id(p) in names}
        fresh = {name for name in own if self.updater_of(name) is not optimizer}
        if fresh:
            spec = OptimizerSpec.of(optimizer, self._device())
            self._entries |= {name: _Updated(spec, weakref.ref(optimizer)) for name in own}
        return fresh

    def updater_of(self, name: str) -> torch.optim.Optimizer | None:
        """Return the optimizer of a parameter, or None if no optimizer that lives has updated it."""
        return self._entries[name].by() if name in self._entries else None

    def state_owner_of(self, name: str) -> torch.optim.Optimizer | None:
        """Return the optimizer that is to get the state of a parameter that leaves the store, or None."""
        optimizer = self.updater_of(name)
        return None if optimizer is None or is_state_replaced(optimizer) else optimizer

    def renamed(self, old_names: Mapping[str, str]) -> Updaters:
        """Return the same for a model with other names.

        Args:
            old_names: new name -> old name, of the parameters that the model still has.
        """
        entries = self._entries
        return Updaters(self._device, {new: entries[old] for new, old in old_names.items() if old in entries})

    @property
    def specs(self) -> dict[str, OptimizerSpec]:
        """The kind of optimizer of each parameter that has one."""
        return {name: entry.spec for name, entry in self._entries.items()}

    @property
    def rule(self) -> UpdateRule:
        """The update rule for a store of these parameters."""
        return SeveralRules(self.specs) if self._entries else UpdateRule(NO_UPDATES)

    @property
    def state_bytes(self) -> int:
        """The most bytes of optimizer state that a parameter element has."""
        return max((optimizer_state_bytes(spec) for spec in self.specs.values()), default=0)


def live_optimizers(params: Collection[nn.Parameter]) -> list[torch.optim.Optimizer]:
    """Return every optimizer over some of these parameters, the newest last.

    A trainer's wrapper of an optimizer is left out: it has no groups itself and shows those of another.
    """
    wanted = set(map(id, params))
    return [
        found
        for found in gc.get_objects()
        if issubclass(type(found), torch.optim.Optimizer)
        and "param_groups" in vars(found)
        and any(id(param) in wanted for group in found.param_groups for param in group["params"])
    ]
