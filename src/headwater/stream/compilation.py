"""`torch.compile` of the modules of stages, inside the hooks that bind their weights."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from headwater.core.files import disk_errors
from headwater.core.scratch import private_folder
from headwater.core.stage import StageSpec

_CACHE = "TORCHINDUCTOR_CACHE_DIR"


def _cache_folder() -> Path:
    """Return the folder of compiled code. Another user could create torch's default folder in /tmp first."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    with disk_errors(root):
        return private_folder(root / "headwater" / "compiled")


def compile_stages(model: nn.Module, stages: Sequence[StageSpec]) -> None:
    """Compile the forward of each stage's module, if several stages have the same shapes.

    Modules of one class with equal shapes share a compilation: weights are its inputs, not constants. Other
    stages run only once a step and are not compiled.

    Args:
        model: the model; the `forward` of its modules is replaced.
        stages: the stages.
    """
    if _CACHE not in os.environ:
        os.environ[_CACHE] = str(_cache_folder())
    shapes = [tuple((param.shape, param.wire_dtype) for param in stage.params) for stage in stages]
    for stage, shape in zip(stages, shapes, strict=True):
        if stage.name and shapes.count(shape) > 1:
            module = model.get_submodule(stage.name)
            # `forward`, not the module: the hooks that bind weights must stay outside of the graph.
            module.forward = torch.compile(module.forward, dynamic=False)
