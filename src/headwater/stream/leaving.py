"""Copies from the weight store to parameters that leave the store and become plain parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from headwater.core.stage import ParamKey
from headwater.stream.parameter_memory import leave_store

if TYPE_CHECKING:
    from headwater.store.store import WeightStore


def give_back(
    store: WeightStore,
    key: ParamKey,
    param: nn.Parameter,
    optimizer: torch.optim.Optimizer | None,
    device: torch.device | None = None,
) -> None:
    """Copy values and gradient from the store to the parameter, and state to the optimizer.

    Args:
        store: the weight store.
        key: the parameter's place in the store.
        param: a plain parameter of the same shape.
        optimizer: the optimizer that updates the parameter; no state is copied if not given.
        device: the device of the copies; the parameter's device if not given.
    """
    device = param.device if device is None else device
    param.data = store.parameters.read_param(key).to(device)
    # After the assignment: former views share the new memory.
    leave_store(param)
    gradient = store.borrow_gradient(key)
    if gradient is not None:
        param.grad = gradient.to(device)
    if optimizer is not None:
        give_state_back(store, key, param, optimizer)


def give_state_back(
    store: WeightStore, key: ParamKey, param: nn.Parameter, optimizer: torch.optim.Optimizer
) -> None:
    """Copy the optimizer state of a parameter from the store to the optimizer.

    Args:
        store: the weight store.
        key: the parameter's place in the store.
        param: the parameter.
        optimizer: the optimizer that has updated the parameter until now.
    """
    # The scalars are those of the last update that was applied.
    store.flush_stage(key[0])
    scalars, device = store.scalars.by_stage[key[0]][key[1]], param.device
    if scalars is not None:
        tensors = {
            name: store.parameters.read_param(key, name).to(device)
            for name in store.rule.state_layout(store.spec(key))
        }
        receive = getattr(optimizer.state, "receive", optimizer.state.__setitem__)
        receive(param, {**scalars, **tensors})
