"""Hooks of `state_dict` and `load_state_dict` for optimizers whose state is in weight stores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from headwater.api.moments import lazy_state
from headwater.api.optimizer_record import is_state_replaced
from headwater.api.optimizer_state import install
from headwater.api.registry import model_of
from headwater.api.stored_state import Optimizer, has_stored_state, params_of
from headwater.core.interrupts import uninterrupted
from headwater.core.stage import ParamKey
from headwater.stream.parameters import ParameterAtRest

if TYPE_CHECKING:
    from headwater.api.streamed import StreamedModel


def add_stored_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Add the optimizer state that is in stores to a `state_dict` of the optimizer (a hook of torch)."""
    states = {key: dict(state) for key, state in state_dict["state"].items()}
    if not is_state_replaced(optimizer):
        for number, param in enumerate(params_of(optimizer)):
            stored = lazy_state(optimizer, param) if isinstance(param, ParameterAtRest) else None
            if stored:
                states[number] = stored
    state_dict["state"] = {number: states[number] for number in sorted(states)}


@uninterrupted
def take_stored_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Load the states of streamed parameters into stores, and return the `state_dict` without them.

    Torch calls this hook before it loads a `state_dict`.
    """
    present = install(optimizer)
    params = list(params_of(optimizer))
    state = dict(state_dict["state"])
    saved = [number for group in state_dict["param_groups"] for number in group["params"]]
    # Before any state is loaded: another layout replaces the store.
    _change_layouts(optimizer, state_dict)
    # Not strict: torch compares the groups after this hook, and raises its own error.
    for number, param in zip(saved, params, strict=False):
        if has_stored_state(param, optimizer):
            loaded = state.pop(number, None)
            present.load(param, loaded and _with_dtypes(param, loaded, number, state_dict["param_groups"]))
    return {**state_dict, "state": state}


def _with_dtypes(
    param: ParameterAtRest, state: Mapping[str, Any], number: int, groups: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return a state that is being loaded, with its scalars in the dtypes that torch's loading uses."""

    def converted(name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dim() > 0:
            return value
        return Optimizer._process_value_according_to_param_policy(param, value, number, groups, name)

    return {name: converted(name, value) for name, value in state.items()}


def _change_layouts(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Change the layout of stores so that the optimizer state that is being loaded fits in."""
    groups = [(group, number) for group in state_dict["param_groups"] for number in group["params"]]
    loaded: dict[StreamedModel, dict[ParamKey, tuple[Mapping[str, Any], Mapping[str, Any]]]] = {}
    for (group, number), param in zip(groups, params_of(optimizer), strict=False):
        if has_stored_state(param, optimizer) and state_dict["state"].get(number):
            home = param.home
            states = loaded.setdefault(model_of(home.store), {})
            states[home.stage, home.index] = group, state_dict["state"][number]
    for model, states in loaded.items():
        model.optimizers.expect_states(states)
