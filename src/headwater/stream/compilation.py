"""`torch.compile` of stages, beneath the hooks that bind their weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from headwater.core.stage import StageSpec


def compile_stages(model: nn.Module, stages: Sequence[StageSpec]) -> None:
    """Compile the forward of every module that makes a stage and has equals; the others run once a step.

    Modules of one class with equal shapes share a compilation: weights are inputs to it, not constants.

    Args:
        model: its modules' `forward` is replaced.
        stages: the stages.
    """
    shapes = [tuple((param.shape, param.wire_dtype) for param in stage.params) for stage in stages]
    for stage, shape in zip(stages, shapes, strict=True):
        if stage.name and shapes.count(shape) > 1:
            module = model.get_submodule(stage.name)
            module.forward = torch.compile(module.forward, dynamic=False)
