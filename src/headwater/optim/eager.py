"""Optimizers for tensors in host memory, which neither import torch's compiler nor use a GPU."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from headwater.optim.catalog import OptimizerClass


def eager(kind: OptimizerClass) -> OptimizerClass:
    """Return a subclass of an optimizer whose steps can be neither compiled nor recorded in a CUDA graph.

    torch wraps `step` and `add_param_group` so that its compiler skips them. These wrappers import the
    compiler, which takes 70 MiB and two seconds. The subclass calls the wrapped functions directly, `step`
    under `torch.no_grad`. Each step of torch's optimizers also asks CUDA if a graph is being recorded. In a
    thread that has chosen no GPU, this call creates a CUDA context on GPU 0, whose memory another process may
    need. The subclass leaves the call out.
    """
    own = {
        "_accelerator_graph_capture_health_check": _no_check,
        "add_param_group": inspect.unwrap(kind.add_param_group),
        "step": torch.no_grad()(inspect.unwrap(kind.step)),
    }
    if kind is torch.optim.Adagrad:
        own["_init_group"] = _init_group_of_adagrad
    return type(kind.__name__, (kind,), own)


def _init_group_of_adagrad(optimizer: Any, group: dict[str, Any], *lists: list[Any]) -> Any:
    """Create the state of parameters that lack it; then call Adagrad's own method.

    In torch 2.11 only the constructor of Adagrad creates state. The weight store updates other tensors than
    those with which the optimizer was constructed.
    """
    for param in group["params"]:
        if param.grad is not None and not optimizer.state[param]:
            first = optimizer.defaults["initial_accumulator_value"]
            made = type(optimizer)([param], initial_accumulator_value=first, fused=group["fused"])
            optimizer.state[param] = made.state[param]
    return torch.optim.Adagrad._init_group(optimizer, group, *lists)


def _no_check(optimizer: torch.optim.Optimizer) -> None:
    pass
