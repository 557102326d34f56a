"""Optimizers that do not import torch's compiler, whose import takes 70 MiB and two seconds."""

from __future__ import annotations

import inspect

import torch

from headwater.optim.catalog import OptimizerClass


def eager(kind: OptimizerClass) -> OptimizerClass:
    """Return a subclass of an optimizer that never imports torch's compiler; its steps cannot be compiled.

    torch wraps `step` and `add_param_group` so that its compiler skips them. These wrappers import the
    compiler. The subclass calls the wrapped functions directly, `step` under `torch.no_grad`.
    """
    own = {
        "add_param_group": inspect.unwrap(kind.add_param_group),
        "step": torch.no_grad()(inspect.unwrap(kind.step)),
    }
    return type(kind.__name__, (kind,), own)
