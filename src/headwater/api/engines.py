"""Construction of an engine from a plan and the options of a backend."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

from torch import nn

from headwater.config.sections import BackendConfig
from headwater.core.arithmetic import Kernels
from headwater.core.files import disk_errors
from headwater.core.half_products import convert_half_products_everywhere
from headwater.core.kernels import multiplies_slowly
from headwater.core.loss_function import LossFunction, call_model
from headwater.core.modes import converts_half_products
from headwater.core.precision import Precision
from headwater.core.tensor_memory import tune_allocator
from headwater.core.warn_once import warn_once
from headwater.fabric.fabric import ALONE, Fabric
from headwater.optim.spec import OptimizerSpec
from headwater.plan.types import Plan
from headwater.store.kept import FirstMask
from headwater.store.rules import UpdateRules
from headwater.store.store import WeightStore
from headwater.stream.engine import Engine
from headwater.stream.options import EngineOptions, Initial

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class EngineSteps:
    """The settings of training steps that the engine itself runs, as a `Trainer` does.

    Attributes:
        loss_function: returns the loss of a batch; the model itself if not given.
        seed: seed of the random numbers of each micro-batch; if `None`, the engine does not seed.
        first_mask: see `EngineOptions`.
    """

    loss_function: LossFunction = call_model
    seed: int | None = None
    first_mask: FirstMask | None = None


def disk_folder(backend: BackendConfig) -> Path | None:
    """Return the folder of the disk tier; create it if missing. Several runs may share the folder."""
    if backend.disk is None:
        return None
    folder = backend.disk.path
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def build_engine(
    model: nn.Module,
    plan: Plan,
    optimizer: OptimizerSpec | UpdateRules,
    backend: BackendConfig,
    *,
    initial: Initial | WeightStore | None = None,
    fabric: Fabric = ALONE,
    steps: EngineSteps | None = None,
) -> Engine:
    """Build an engine that trains `model` as `plan` says.

    Args:
        model: any module. The engine owns its parameters from now on.
        plan: the plan.
        optimizer: the optimizer, or update rules.
        backend: the options of the backend.
        initial: a function that returns initial values, or the store of the engine that the new one
            replaces; the present values of the model's parameters if not given.
        fabric: the ranks that train together.
        steps: the settings of the engine's own steps; the user's loop trains if not given.

    Returns:
        The engine.

    Raises:
        StreamError: if weights have no values, or another engine streams them.
        DiskFullError: if the files of the disk tier do not fit.
    """
    if plan.user_loop and plan.converts_half_products:
        convert_half_products_everywhere()  # the user's loop computes outside of the contexts of the engine
    # Before the engine allocates memory: the setting has no effect on memory that is allocated already.
    if plan.device == "cpu" and backend.allocator == "tuned":
        tune_allocator(keep=plan.memory_is_ample)
    if plan.user_loop and backend.compile == "auto":
        warn_once(
            logger,
            "compile: auto does not compile blocks in your own loop, because the number of steps is not "
            "known; write compile: true to compile them",
        )
    own = steps or EngineSteps()
    options = EngineOptions(
        verify_disk=backend.verify_disk,
        first_mask=own.first_mask,
        folder_of_copies=backend.disk.path if backend.disk else None,
    )
    return Engine(
        model,
        plan,
        optimizer,
        initial=initial,
        seed=own.seed,
        loss_function=own.loss_function,
        fabric=fabric,
        options=options,
    )


def warn_of_half_products(device: str, precision: Precision, kernels: Kernels, *, own_loop: bool) -> None:
    """Log a warning, once, if products in bf16 or fp16 are slow here, or not computed by the plan's kernels.

    Args:
        device: `cpu` or `cuda`.
        precision: precision of the run.
        kernels: the kernels of its matrix products.
        own_loop: True if the user's own loop trains.
    """
    if kernels != "exact" or not multiplies_slowly(precision, device):
        return
    if own_loop and converts_half_products():
        warn_once(
            logger,
            "fp32 kernels multiply matrices in %s for this model too, because another model of this process "
            "has the option `matmul: fast`: results differ by rounding from those of torch's kernels",
            precision.name,
        )
        return
    warn_once(
        logger,
        "this processor has no instructions for %s, so torch multiplies matrices in %s several times "
        "slower than in fp32; with the option `matmul: %s` of the backend, fp32 kernels multiply them "
        "instead, and results differ by rounding",
        precision.name,
        precision.name,
        "fast" if own_loop else "auto",
    )
