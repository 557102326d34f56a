"""Backends: a script computes with the streaming engine, or with plain PyTorch on the CPU or a GPU."""

from __future__ import annotations

import logging
import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

import torch

from headwater.api.backend_options import config_of
from headwater.api.building import BuildInFiles
from headwater.api.ranks import take_accelerator
from headwater.config.sections import BackendConfig
from headwater.core.errors import ConfigError
from headwater.core.process_value import ProcessValue
from headwater.distributed import check_num_csx
from headwater.fabric.cluster import is_rank
from headwater.fabric.fabric import DEFAULT_TIMEOUT_S
from headwater.fabric.launch.script import use_ranks
from headwater.fabric.membership import current
from headwater.plan.options import check_gpu

BackendKind = Literal["CSX", "CPU", "GPU"]

_NUM_CSX = "backend, option num_csx"

logger = logging.getLogger(__name__)

_current = ProcessValue["Backend | None"](None)
"""The backend that the script has chosen. Global, so that later calls need not name it."""


class Backend:
    """The place where models compute, with its options; see `backend`.

    Attributes:
        kind: `CSX` streams weights; `CPU` and `GPU` are plain PyTorch.
        config: resource limits, and the choices that the user has made instead of the planner.
        compile_dir: folder for the report of `compile_only`.
        compile_only: stop at the first step, after a report of the model has been written.
        validate_only: stop at the first step, after the model has been checked.
    """

    def __init__(
        self, config: BackendConfig, compile_dir: Path, *, compile_only: bool, validate_only: bool
    ) -> None:
        check_num_csx(config.num_csx, where=_NUM_CSX)
        self.kind: BackendKind = config.backend_type
        self.config = config
        self.compile_dir = compile_dir
        self.compile_only = compile_only
        self.validate_only = validate_only
        check_gpu(config, where="backend")

    @property
    def torch_device(self) -> torch.device:
        """The device of batches and losses."""
        if self.kind == "CPU" or not torch.cuda.is_available():
            return torch.device("cpu")
        # Not always device 0: `take_accelerator` chooses another one for each rank.
        return torch.device("cuda", torch.cuda.current_device())

    @property
    def device(self) -> AbstractContextManager[Any]:
        """The context in which to build a model; torch initialises the parameters as usual.

        For `CPU` and `GPU`, parameters are created on the device. For `CSX` they are created in host memory,
        or in files if the backend has a disk. With a disk the model may be larger than memory.
        """
        if self.kind != "CSX":
            return self.torch_device
        return BuildInFiles(self.config.disk.path) if self.config.disk else torch.device("cpu")

    @property
    def num_csx(self) -> int:
        """The number of compute ranks."""
        return self.config.num_csx

    def __repr__(self) -> str:
        return f"Backend({self.kind!r}, torch_device={self.torch_device})"


def backend(
    backend_type: str = "CSX",
    *,
    compile_dir: str | os.PathLike[str] = "compile",
    compile_only: bool = False,
    validate_only: bool = False,
    **options: Any,
) -> Backend:
    """Choose the backend of all models that are compiled from now on.

    Args:
        backend_type: `"CSX"` streams the weights, on a GPU if torch finds one. `"CPU"` and `"GPU"` run the
            same script as plain PyTorch.
        compile_dir: folder for the report of `compile_only`.
        compile_only: stop at the first step, and write a report of the model into `compile_dir`.
        validate_only: stop at the first step, after a check that model, loss and batch fit each other.
        **options: keys of the section `backend` of a params file: `device_memory` and `host_memory` (bytes,
            or `"4GiB"`), `disk` (a folder, or `{path, size}`), `num_slabs`, `activations`, `tier`,
            `stages_in_memory`, `stages_on_device`, `gradient_tier`, `optimizer_state`, `compile`, `matmul`,
            `allocator`; and `num_csx`, the number of compute ranks. With more than one rank the script is
            started again for each: see [Note: ranks of a script].

    Returns:
        The backend.

    Raises:
        ConfigError: if an option is unknown or wrong, the device is missing, or several ranks cannot be
            started.
    """
    config = config_of(backend_type, options)
    made = Backend(config, Path(compile_dir), compile_only=compile_only, validate_only=validate_only)
    if made.num_csx > 1 and not (compile_only or validate_only):
        timeout_s = config.cluster_config.rank_timeout_s
        start_ranks(made.num_csx, made.kind, where=_NUM_CSX, timeout_s=timeout_s)
    elif made.kind == "CSX" and made.num_csx == 1 and is_rank() and current().size == 1:
        logger.warning(
            "a launcher has started %s ranks, but num_csx is 1: each rank trains separately",
            os.environ["WORLD_SIZE"],
        )
    _current.value = made
    return made


def start_ranks(num_csx: int, kind: BackendKind, *, where: str, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
    """Run the rest of this script on `num_csx` ranks, each of them a process.

    Args:
        num_csx: number of ranks, at least 2.
        kind: the kind of the backend.
        where: the place where the user wrote `num_csx`; for errors.
        timeout_s: seconds that a rank waits for another rank before it raises an error.

    Raises:
        ConfigError: if the ranks cannot be started.
    """
    if kind != "CSX":
        raise ConfigError(
            f"expected num_csx=1 for plain PyTorch ({kind}), which computes on one rank, got {num_csx}",
            where=where,
            remedy='write "CSX", or num_csx=1',
        )
    use_ranks(num_csx, where=where, timeout_s=timeout_s)
    take_accelerator("cuda" if torch.cuda.is_available() else "cpu", current(), where=where)


def current_backend() -> Backend | None:
    """Return the backend that was chosen last, or `None`."""
    return _current.value
