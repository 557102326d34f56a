"""The optimizer that updates each streamed parameter."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from typing import Any, get_args

import torch
from torch import nn

from headwater.api.loop_steps import runs_in_loop
from headwater.api.optimizer_record import is_state_replaced
from headwater.core.errors import ConfigError
from headwater.core.stage import OptimizerState, ParamSpec
from headwater.optim.probe import state_tensors
from headwater.optim.spec import NO_UPDATES, OptimizerSpec, UpdateKind, group_options, state_signature
from headwater.plan.options import optimizer_state_bytes
from headwater.store.rule import SeveralRules, UpdateRule
from headwater.store.rules import UpdateRules

Options = Mapping[str, Any]

_STATEFUL = {"momentum": 0.5, "amsgrad": True, "centered": True}
"""Option of a torch optimizer that adds state tensors (such as `momentum`) -> a value that does so."""


@dataclasses.dataclass(frozen=True)
class _Updated:
    """The optimizer of a parameter, and its options.

    Attributes:
        spec: the kind of optimizer.
        by: returns the optimizer, or `None` after it was deleted.
        options: the options of the parameter's group when the optimizer created the parameter's state.
        known: the signatures of all options with which the optimizer can update that state.
    """

    spec: OptimizerSpec
    by: Callable[[], torch.optim.Optimizer | None]
    options: Mapping[str, Any]
    known: frozenset[Hashable]


class Updaters:
    """The optimizer of each parameter of a model, by the parameter's name.

    Args:
        device: returns the type of the device on which the model computes.
        entries: the known optimizers, by name of the parameter.
    """

    def __init__(self, device: Callable[[], str], entries: Mapping[str, _Updated] | None = None) -> None:
        self._device = device
        self._entries = dict(entries or {})

    def note(self, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> set[str]:
        """Record that `optimizer` updates its parameters of this model from now on.

        Args:
            optimizer: an optimizer of any parameters.
            names: the name of each parameter of the model, by identity.

        Returns:
            The names of the parameters that it did not update before.
        """
        own = {names[id(p)] for group in optimizer.param_groups for p in group["params"] if id(p) in names}
        fresh = {name for name in own if self.updater_of(name) is not optimizer}
        # The fast path, because this function runs in every step.
        if not fresh or runs_in_loop(optimizer):
            return set()
        spec = OptimizerSpec.of(optimizer, self._device())
        fitting = _Fitting(spec)
        for options, params in _groups(optimizer):
            for param in params:
                name = names.get(id(param))
                if name in fresh:
                    fitted = fitting.options(options, optimizer.state.get(param, {}))
                    known = frozenset({state_signature(options), state_signature(fitted)})
                    # Weak references, so that an optimizer that the script replaces is freed.
                    self._entries[name] = _Updated(spec, weakref.ref(optimizer), fitted, known)
                elif name is not None:
                    self._entries[name] = dataclasses.replace(self._entries[name], spec=spec)
        return fresh

    def changed(self, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, Options]:
        """Return the parameters whose group has new options that may need other state tensors.

        Args:
            optimizer: an optimizer that `note` has recorded for all of its parameters.
            names: the name of each parameter of the model, by identity.

        Returns:
            Name -> the present options of the group.
        """
        found: dict[str, Options] = {}
        for options, params in _groups(optimizer):
            signature = state_signature(options)
            own = [names[id(param)] for param in params if id(param) in names]
            found |= {name: options for name in own if signature not in self._entries[name].known}
        return found

    def begin_state(self, name: str, options: Options) -> None:
        """Record that the optimizer creates the state of a parameter with these options."""
        entry = self._entries[name]
        self._entries[name] = dataclasses.replace(
            entry, options=options, known=frozenset({state_signature(options)})
        )

    def expect_state(self, name: str, options: Options, state: Mapping[str, Any]) -> None:
        """Record that the optimizer state of a parameter will be replaced by a loaded one.

        Args:
            name: the name of the parameter.
            options: the options of its group in the optimizer that the state comes from.
            state: the loaded state.
        """
        entry = self._entries[name]
        options = {**entry.options, **{key: options[key] for key in entry.options.keys() & options.keys()}}
        fitted = _Fitting(entry.spec).options(options, state)
        known = frozenset({state_signature(options), state_signature(fitted)})
        self._entries[name] = dataclasses.replace(entry, options=fitted, known=known)

    def keep_state(self, param: ParamSpec, options: Options) -> None:
        """Accept new options for a parameter's state. Raise if they need state tensors that it lacks.

        Raises:
            ConfigError: if the optimizer needs a state tensor that the parameter does not have.
        """
        entry = self._entries[param.name]
        needed = UpdateRule(entry.spec, options).state_layout(param)
        missing = needed.keys() - UpdateRule(entry.spec, entry.options).state_layout(param).keys()
        if missing:
            raise ConfigError(
                f"{entry.spec.name} needs the state {sorted(missing)} with the new options of the parameter "
                "group, but it has already updated the parameter without that state",
                where=param.name,
                remedy="set these options before the first step, or remove the state of the parameter first",
            )
        known = entry.known | {state_signature(options)}
        self._entries[param.name] = dataclasses.replace(entry, known=known)

    def updater_of(self, name: str) -> torch.optim.Optimizer | None:
        """Return the optimizer that updates a parameter. `None` if none has yet, or if it was deleted."""
        return self._entries[name].by() if name in self._entries else None

    def state_owner_of(self, name: str) -> torch.optim.Optimizer | None:
        """Return the optimizer to which the state of a parameter goes when it leaves the store, or `None`."""
        optimizer = self.updater_of(name)
        return None if optimizer is None or is_state_replaced(optimizer) else optimizer

    def renamed(self, old_names: Mapping[str, str]) -> Updaters:
        """Return a copy for a model whose parameters have new names.

        Args:
            old_names: new name -> old name, of the parameters that the model still has.
        """
        entries = self._entries
        return Updaters(self._device, {new: entries[old] for new, old in old_names.items() if old in entries})

    def without(self, names: Collection[str]) -> Updaters:
        """Return a copy without the optimizers of these parameters."""
        return Updaters(self._device, {n: each for n, each in self._entries.items() if n not in names})

    def copy(self) -> Updaters:
        """Return an independent copy."""
        return Updaters(self._device, self._entries)

    @property
    def specs(self) -> dict[str, OptimizerSpec]:
        """The kind of optimizer of each parameter that has one."""
        return {name: entry.spec for name, entry in self._entries.items()}

    @property
    def rule(self) -> UpdateRules:
        """The update rule for a store of these parameters."""
        if not self._entries:
            return UpdateRule(NO_UPDATES)
        return SeveralRules(self.specs, {name: entry.options for name, entry in self._entries.items()})

    def update_kind_on(self, device: str) -> UpdateKind:
        """Return the kind that needs the most memory among those of the optimizers on a type of device."""
        kinds = {entry.spec.update_kind_on(device) for entry in self._entries.values()}
        return max(kinds, key=get_args(UpdateKind).index, default="fused")

    def state_bytes(self, stored: OptimizerState, params: Iterable[ParamSpec]) -> float:
        """Return the bytes of optimizer state per trained element, if all have the optimizer that keeps most.

        Args:
            stored: how the store keeps optimizer state.
            params: the parameters. If they differ in their dtype, the result is a mean.
        """
        # Each kind is made once: a model has thousands of parameters, but few options.
        kinds = {(id(each.spec), state_signature(each.options)): each for each in self._entries.values()}

        def most(dtype: torch.dtype) -> int:
            all_bytes = (
                optimizer_state_bytes(each.spec, each.options, stored=stored, dtype=dtype)
                for each in kinds.values()
            )
            return max(all_bytes, default=0)

        elements: Counter[torch.dtype] = Counter()
        for param in params:
            if param.requires_grad:  # others may have integers, for which no optimizer keeps state
                elements[param.dtype] += param.numel
        return sum(count * most(dtype) for dtype, count in elements.items()) / max(1, elements.total())


def _groups(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Options, list[nn.Parameter]]]:
    """Yield the options and the parameters of each group."""
    for group in optimizer.param_groups:
        yield group_options(optimizer, group), group["params"]


class _Fitting:
    """A search for the options with which an optimizer keeps exactly the tensors that a state has already.

    A state keeps its tensors after the option that adds them is switched off, and may be saved like that.

    Args:
        spec: the kind of optimizer.
    """

    def __init__(self, spec: OptimizerSpec) -> None:
        self._spec = spec
        self._found: dict[tuple[Hashable, frozenset[str]], Options] = {}

    def options(self, options: Options, state: Mapping[str, Any]) -> Options:
        """Return options with which the optimizer keeps the tensors of `state`: if possible `options`."""
        tensors = frozenset(state_tensors(state))
        if not tensors or not self._spec.elementwise:
            return options
        key = state_signature(options), tensors
        if key not in self._found:
            is_enough = self._state_names(options) <= tensors
            fitting = (each for each in _variants(options) if self._state_names(each) == tensors)
            self._found[key] = next(fitting, options) if is_enough else options
        return self._found[key]

    def _state_names(self, options: Options) -> frozenset[str]:
        # Any small matrix: the names of the tensors do not depend on the size.
        probe = ParamSpec("weight", (8, 8), torch.float32, torch.float32)
        return frozenset(UpdateRule(self._spec, options).state_layout(probe))


def _variants(options: Options) -> Iterator[Options]:
    """Yield the options, then variants with which the optimizer keeps fewer or more state tensors."""
    yield options
    names = [name for name in _STATEFUL if name in options]
    for values in itertools.product((False, True), repeat=len(names)):
        chosen = {name: _STATEFUL[name] if on else 0 for name, on in zip(names, values, strict=True)}
        yield {**options, **chosen}


def live_optimizers(params: Collection[nn.Parameter]) -> list[torch.optim.Optimizer]:
    """Return every optimizer over some of these parameters, in any order.

    Only optimizers are returned whose steps run torch's hooks. A class that never calls the constructor of
    `torch.optim.Optimizer`, such as a wrapper, has no hooks: its step is code of the loop like any other.
    """
    wanted = set(map(id, params))
    return [
        found
        # Each object refers to its class. This search is faster than one through all objects.
        for found in gc.get_referrers(*_subclasses_of(torch.optim.Optimizer))
        # Not `isinstance`, which may run code of proxies among these objects.
        if issubclass(type(found), torch.optim.Optimizer)
        and "param_groups" in vars(found)
        and hasattr(type(found).step, "hooked")  # by torch's constructor
        and any(id(param) in wanted for group in found.param_groups for param in group["params"])
    ]


def _subclasses_of(kind: type) -> set[type]:
    """Return a class and all classes that inherit from it."""
    return {kind}.union(*map(_subclasses_of, type.__subclasses__(kind)))
