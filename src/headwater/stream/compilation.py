"""Compilation of stages' modules with `torch.compile`. The hooks that bind weights are not compiled."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headwater.core.errors import HeadwaterError, ModelError
from headwater.core.files import disk_errors
from headwater.core.module_calls import replace_forward
from headwater.core.scratch import private_folder
from headwater.core.stage import StageSpec
from headwater.plan.compilation import repeated_stages

_CACHE = "TORCHINDUCTOR_CACHE_DIR"


def _cache_folder() -> Path:
    """Return the folder of compiled code. Another user could create torch's default folder in /tmp first."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    with disk_errors(root):
        return private_folder(root / "headwater" / "compiled")


def use_private_cache() -> None:
    """Set a folder of this user for compiled code, if the environment names no folder."""
    if _CACHE not in os.environ:
        os.environ[_CACHE] = str(_cache_folder())


def compile_stages(model: nn.Module, stages: Sequence[StageSpec]) -> Callable[[], None]:
    """Compile the forward of each stage's module, if several stages have the same class and shapes.

    Modules of one class with equal shapes share a compilation: weights are its inputs, not constants. Other
    stages run only once a step and are not compiled. The compiler runs at the first call of a module, which
    raises `ModelError` if the module cannot be compiled.

    Args:
        model: the model; the `forward` of its modules is replaced.
        stages: the stages.

    Returns:
        A function that restores the original forwards.
    """
    use_private_cache()
    compiled = ExitStack()
    groups = repeated_stages(stages, lambda name: type(model.get_submodule(name)))
    for index in (index for group in groups for index in group):
        name = stages[index].name
        compiled.callback(compile_forward(model.get_submodule(name), name))
    return compiled.close


def compile_forward(module: nn.Module, name: str) -> Callable[[], None]:
    """Replace the forward of a module by a compiled one. Return a function that restores the original."""
    forward = module.forward
    # `forward`, not the module: the hooks that bind weights must stay outside of the graph.
    compiled = torch.compile(forward, dynamic=False)

    @functools.wraps(forward)
    def compiled_forward(*args: Any, **kwargs: Any) -> Any:
        from torch._dynamo.exc import TorchDynamoException  # takes a second
        from torch._functorch import config

        try:
            # Otherwise the backward is compiled when it runs, and its errors do not name the module.
            with config.patch(force_non_lazy_backward_lowering=True):
                return compiled(*args, **kwargs)
        except TorchDynamoException as error:
            raise _cannot_compile(name, error) from error

    return replace_forward(module, compiled_forward)


def _cannot_compile(name: str, error: Exception) -> HeadwaterError:
    """Return the error for a module that `torch.compile` does not compile."""
    # Errors of the compiler are long, and the first line may only be a title.
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return ModelError(
        f"torch.compile cannot compile this module: {' '.join(lines[:_LINES])}",
        where=name,
        remedy="write compile: false, or change the module; torch.compile needs a C++ compiler on a CPU",
    )


_LINES = 4
"""Number of lines of the compiler's error that the message repeats."""
