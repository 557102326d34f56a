"""Copies from the weight store to parameters that leave the store and become plain parameters.

[Note: parameters that leave the store]
Their values, gradients and optimizer state are in host memory: a plan may have no device memory left for
them. There is one exception. If a loop assigns values of another shape or dtype, the gradient and the state
go to the device of these values, as torch's optimizers expect. `release` moves them to host memory, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from headwater.core.stage import ParamKey
from headwater.stream.parameter_memory import leave_store

if TYPE_CHECKING:
    from headwater.store.store import WeightStore

HOST = torch.device("cpu")


def give_back(
    store: WeightStore,
    key: ParamKey,
    param: nn.Parameter,
    optimizer: torch.optim.Optimizer | None,
    device: torch.device = HOST,
) -> None:
    """Copy values and gradient from the store to the parameter, and state to the optimizer.

    Args:
        store: the weight store.
        key: the parameter's place in the store.
        param: a plain parameter of the same shape.
        optimizer: the optimizer that updates the parameter; no state is copied if not given.
        device: the device of the copies; see [Note: parameters that leave the store].
    """
    param.data = store.parameters.read_param(key).to(device)
    # This follows the assignment, because former views share the new memory.
    leave_store(param)
    gradient = store.borrow_gradient(key)
    if gradient is not None:
        # Gradients of weights that are streamed in 16 bits have 16 bits too.
        param.grad = gradient.to(device, param.dtype)
    if optimizer is not None:
        give_state_back(store, key, param, optimizer, device)


def give_state_back(
    store: WeightStore,
    key: ParamKey,
    param: nn.Parameter,
    optimizer: torch.optim.Optimizer,
    device: torch.device = HOST,
) -> None:
    """Copy the optimizer state of a parameter from the store to the optimizer.

    Args:
        store: the weight store.
        key: the parameter's place in the store.
        param: the parameter.
        optimizer: the optimizer that has updated the parameter until now.
        device: the device of the copies.
    """
    # The scalars are those of the last update that was applied.
    store.flush_stage(key[0])
    scalars = store.scalars.by_stage[key[0]][key[1]]
    if scalars is not None:
        tensors = {
            name: store.parameters.read_param(key, name).to(device)
            for name in store.rule.state_layout(store.spec(key))
        }
        if scalars or tensors:  # torch lists no parameters without state
            _give_state(optimizer, param, {**scalars, **tensors})


def move_to_host(param: nn.Parameter, optimizer: torch.optim.Optimizer | None) -> None:
    """Move a parameter that has left the store, its gradient and its optimizer state to host memory."""
    param.data = param.data.to(HOST)
    if param.grad is not None:
        # The gradient may have the former shape of the parameter: torch would refuse `param.grad = ...`.
        param.grad.data = param.grad.data.to(HOST)
    state = {} if optimizer is None else dict(optimizer.state.get(param, {}))
    if optimizer is not None and state:
        is_tensor = {name for name, value in state.items() if isinstance(value, torch.Tensor)}
        _give_state(optimizer, param, state | {name: state[name].to(HOST) for name in is_tensor})


def _give_state(optimizer: torch.optim.Optimizer, param: nn.Parameter, state: dict[str, Any]) -> None:
    receive = getattr(optimizer.state, "receive", optimizer.state.__setitem__)
    receive(param, state)
