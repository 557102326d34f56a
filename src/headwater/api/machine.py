"""The meaning of a backend's options for the planner and for the engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from headwater.config.sections import BackendConfig
from headwater.core.errors import ConfigError
from headwater.core.stage import ParamSpec
from headwater.optim.spec import OptimizerSpec
from headwater.plan.budget import Fixed
from headwater.plan.types import Activations, Resources
from headwater.store.rule import UpdateRule
from headwater.stream.options import EngineOptions

NO_UPDATES = OptimizerSpec("SGD", {"lr": 0.0})
"""The optimizer of a model that is not updated; it has no state."""


def device_of(backend: BackendConfig) -> str:
    """Return `cpu` or `cuda`. For `CSX` it is `cuda` if torch finds a GPU.

    Raises:
        ConfigError: if the backend is `GPU` and torch finds no GPU.
    """
    if backend.backend_type == "CPU":
        return "cpu"
    if torch.cuda.is_available():
        return "cuda"
    if backend.backend_type == "GPU":
        raise ConfigError(
            "torch finds no GPU here",
            where="trainer.init.backend.backend_type",
            remedy="write CPU, or CSX for the best device there is",
        )
    return "cpu"


def resources_of(backend: BackendConfig, disk: Path | None = None) -> Resources:
    """Return the resource limits of a backend.

    Args:
        backend: the options.
        disk: replaces the folder of the disk tier.
    """
    given = backend.disk
    return Resources(
        device_memory=backend.device_memory,
        host_memory=backend.host_memory,
        disk=disk or (given.path if given else None),
        disk_bytes=given.size if given else None,
    )


def fixed_by(backend: BackendConfig, micro_batch_size: int | None) -> Fixed:
    """Return the decisions that the options make, so that the planner must not."""
    return Fixed(
        tier=None if backend.tier == "auto" else backend.tier,
        num_slabs=backend.num_slabs,
        activations=None if backend.activations == "auto" else Activations(backend.activations),
        micro_batch_size=micro_batch_size,
        gradient_tier=None if backend.gradient_tier == "auto" else backend.gradient_tier,
        masters=None if backend.masters == "auto" else backend.masters,
    )


def engine_options(backend: BackendConfig, *, user_loop: bool = False) -> EngineOptions:
    """Return the options of a backend that concern the engine and not the planner."""
    return EngineOptions(
        user_loop=user_loop,
        fast_matmul=backend.matmul == "fast",
        compile_blocks=backend.compile,
        verify_disk=backend.verify_disk,
    )


def optimizer_state_bytes(optimizer: OptimizerSpec, options: Mapping[str, Any] | None = None) -> int:
    """Return the bytes of state that `optimizer` keeps for each element of a parameter (8 for Adam).

    Args:
        optimizer: the kind of optimizer.
        options: the options of the parameter's group.
    """
    probe = ParamSpec("weight", (8, 8), torch.float32, torch.float32)
    layout = UpdateRule(optimizer, options).state_layout(probe)
    return sum(tensor.dtype.itemsize for tensor in layout.values() if tensor.shape is None)
