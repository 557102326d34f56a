"""Optimizers without torch's compiler, which is 70 MiB and two seconds of imports."""

from __future__ import annotations

import inspect

import torch

from headwater.optim.catalog import OptimizerClass


def eager(kind: OptimizerClass) -> OptimizerClass:
    """The same optimizer, for steps that nobody compiles.

    torch's optimizers keep the compiler away from `step` and `add_param_group` by wrappers that import it.
    Here what they wrap is called itself, `step` without gradients, as its wrapper has it.
    """
    own = {
        "add_param_group": inspect.unwrap(kind.add_param_group),
        "step": torch.no_grad()(inspect.unwrap(kind.step)),
    }
    return type(kind.__name__, (kind,), own)
