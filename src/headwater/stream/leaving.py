"""Parameters that leave the weight store become plain ones again."""

from __future__ import annotations

import torch
from torch import nn

from headwater.store.gradients import ParamKey
from headwater.store.parameters import read_param
from headwater.store.store import WeightStore


def give_back(
    store: WeightStore, key: ParamKey, param: nn.Parameter, optimizer: torch.optim.Optimizer | None
) -> None:
    """Give a parameter that is no longer at rest its values and its gradient, and the optimizer its state.

    Args:
        store: has them.
        key: the parameter's place there.
        param: a plain parameter of the same shape.
        optimizer: the optimizer that updates the parameter; its state is left alone if not given.
    """
    stage, index = key
    device = param.device
    param.data = read_param(store, key).to(device)
    gradient = store.gradients.expose(*key)
    if gradient is not None:
        param.grad = gradient.to(device)
    scalars = store.scalars(stage)[index]
    if optimizer is not None and scalars is not None:
        tensors = {
            name: read_param(store, key, name).to(device) for name in store.rule.state_layout(store.spec(key))
        }
        optimizer.state[param] = {**scalars, **tensors}
