"""The optimizer state that a weight store has for one parameter."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, TypeGuard

import torch

from headwater.api.registry import find_model, model_of
from headwater.core.errors import CheckpointError, ConfigError
from headwater.core.lazy import LazyTensor
from headwater.store.layout import Scalars, StateLayout
from headwater.stream.home import Home
from headwater.stream.parameters import ParameterAtRest

Optimizer = torch.optim.Optimizer


def params_of(optimizer: Optimizer) -> Iterator[torch.nn.Parameter]:
    """Yield the parameters of an optimizer."""
    for group in optimizer.param_groups:
        yield from group["params"]


def has_stored_state(param: object, optimizer: Optimizer) -> TypeGuard[ParameterAtRest]:
    """True if the optimizer state that a store has for a parameter belongs to `optimizer`."""
    if not isinstance(param, ParameterAtRest):
        return False
    model = find_model(param.home.store)
    return model is not None and model.optimizers.is_updated_by(param, optimizer)


def stored_scalars(param: object, optimizer: Optimizer) -> Scalars | None:
    """Return the scalars of a parameter's optimizer state if it is in a store, otherwise `None`."""
    if not has_stored_state(param, optimizer):
        return None
    home = param.home
    # Pending updates are applied first, because they change the scalars.
    home.store.flush_stage(home.stage)
    model_of(home.store).steps.share_scalars()
    scalars = home.store.scalars.by_stage[home.stage][home.index]
    return scalars if scalars or layouts_of(home) else None  # SGD without momentum has no state


def layouts_of(home: Home) -> StateLayout:
    """Return name -> dtype and shape of each optimizer state tensor that the store keeps of a parameter."""
    return home.store.rule.state_layout(home.spec)


def store_state(home: Home, state: Mapping[str, Any]) -> None:
    """Replace the optimizer state of one parameter in the store.

    Raises:
        CheckpointError: if the state is of another optimizer or another shape, or has no values.
    """
    layouts = layouts_of(home)
    tensors = _tensors_of(layouts, state)
    if tensors.keys() != layouts.keys():
        raise CheckpointError(
            f"expected optimizer state with the tensors {sorted(layouts)}, got {sorted(tensors)}",
            where=home.spec.name,
            remedy="load the state of the same kind of optimizer, or assign all expected tensors",
        )
    for name, value in tensors.items():
        shape = layouts[name].shape_for(home.spec)
        if tuple(value.shape) != shape:
            raise CheckpointError(
                f"expected optimizer state of shape {list(shape)}, got {list(value.shape)}",
                where=f"{home.spec.name}, state {name!r}",
                remedy="assign a tensor of the expected shape, or delete the state with pop",
            )
    if any(value.is_meta for value in tensors.values()):
        raise CheckpointError(
            "the optimizer state was loaded while its parameters were empty, and torch dropped the values",
            where=home.spec.name,
            remedy="load it after the model's first forward, or build the model within backend.device",
        )
    # This follows all checks, so that a state that is refused changes nothing.
    for name, value in tensors.items():
        home.store.parameters.write_param(home.key, value.detach(), name)
    set_scalars(home, {k: v for k, v in state.items() if k not in tensors})


def check_storable(home: Home, state: Mapping[str, Any], *, known: bool) -> None:
    """Raise `ConfigError` if plain PyTorch accepts a state for which the store has no place.

    It may have other dtypes: plain PyTorch keeps the dtypes of a state when the parameter gets another one,
    and computes with both. It may have more tensors: an optimizer that calls another one, such as Lookahead,
    keeps its own tensors there. It may have fewer: a user's class may write a number into each state when it
    is constructed, and create the tensors in its first step.

    Args:
        home: the place of a parameter.
        state: the state of the parameter, if it has one.
        known: true if the optimizer is of a class of torch or Headwater.
    """
    layouts = layouts_of(home)
    tensors = _tensors_of(layouts, state)
    missing = sorted(layouts.keys() - tensors.keys())
    if state and missing and not known:
        raise ConfigError(
            f"the optimizer cannot be used here: before a step, the state of a parameter has the entries "
            f"{sorted(map(str, state))}, but not the tensor {missing[0]!r}",
            where=home.spec.name,
            remedy="create all entries of a state together, in the first step of the parameter",
        )
    added = sorted(tensors.keys() - layouts.keys())
    if added and tensors.keys() > layouts.keys():
        raise ConfigError(
            f"the optimizer cannot be used here: the state of a parameter has the tensor {added[0]!r}, which "
            "the optimizer itself does not create",
            where=home.spec.name,
            remedy="keep this tensor outside of optimizer.state",
        )
    for name in layouts.keys() & tensors.keys():
        if tensors[name].dtype != layouts[name].dtype:
            raise ConfigError(
                f"the optimizer cannot be used here: its state {name!r} is {tensors[name].dtype}, and the "
                f"parameter {home.spec.name} has become {home.spec.dtype}",
                remedy="convert the model before the first step, or make a new optimizer after it",
            )


def _tensors_of(layouts: Collection[str], state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of a state. Those of a 0-dimensional parameter have no dimensions, as scalars.

    Args:
        layouts: names of the tensors that the store has.
        state: the state of a parameter.
    """
    return {
        name: value
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and (value.dim() > 0 or name in layouts)
    }


def set_scalars(home: Home, value: Scalars | None) -> None:
    """Replace the scalars of a parameter's optimizer state in the store."""
    scalars = list(home.store.scalars.by_stage[home.stage])
    scalars[home.index] = value and {
        name: each.materialize() if isinstance(each, LazyTensor) else each for name, each in value.items()
    }
    home.store.scalars.by_stage[home.stage] = scalars
