"""Measurement of this machine in a child process, which is killed if it takes too long.

The memory of the probes is freed when that process ends. Its command line is `python -m
headwater.plan.measuring PARENT DEVICE THREADS KERNELS [FOLDER]`. It exits when its parent process, which has
the ID PARENT, exits. KERNELS is one of `Kernels`.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import torch

from headwater.core.arithmetic import Kernels
from headwater.core.errors import ConfigError
from headwater.core.kernels import context_of
from headwater.core.patience import notice_if_long
from headwater.core.units import MIB, format_bytes
from headwater.fabric.parent import end_with
from headwater.plan.machine import free_host_bytes
from headwater.plan.probes import Measurement, measure
from headwater.plan.rates import Calibration

MOST_WALL_S, MOST_CPU_S = 20.0, 10
"""Limits of a measurement: seconds of wall time, and CPU seconds of each thread."""

MOST_GPU_WALL_S = 90.0
"""The limit of wall time with a GPU, whose libraries load for ten seconds and more."""

NEEDED_BYTES = 900 * MIB
"""Bytes of host memory that a measurement needs, including `import torch`."""

logger = logging.getLogger(__name__)


def measure_apart(
    device: str,
    folder: Path | None,
    budget: int | None = None,
    *,
    kernels: Kernels = "exact",
    most_wall_s: float | None = None,
) -> Measurement | None:
    """Measure everything in another process; return `None` if that takes too long or fails.

    Args:
        device: `cpu` or `cuda`.
        folder: an existing folder of the disk tier, if there is one.
        budget: bytes of host memory that both processes may hold; `None`: the free memory.
        kernels: the kernels that the run uses.
        most_wall_s: seconds after which the process is killed; `None`: the limit for this device.

    Raises:
        ConfigError: if `folder` cannot be written to.
    """
    free = free_host_bytes(budget)
    if free < NEEDED_BYTES:
        logger.info(
            "the speed of this machine is not measured: that takes %s of host memory, and %s are free; "
            "`headwater plan --recalibrate` measures it",
            format_bytes(NEEDED_BYTES),
            format_bytes(max(0, free)),
        )
        return None
    # For `-P` see [Note: planted modules].
    command = [sys.executable, "-P", "-m", __name__]
    command += [str(os.getpid()), device, str(torch.get_num_threads()), kernels]
    command += [] if folder is None else [str(folder)]
    if most_wall_s is None:
        most_wall_s = MOST_WALL_S if device == "cpu" else MOST_GPU_WALL_S
    with notice_if_long(f"measuring the speed of this machine, for at most {most_wall_s:g} s"):
        try:
            done = subprocess.run(
                command, capture_output=True, timeout=most_wall_s, stdin=subprocess.DEVNULL, check=False
            )
        except subprocess.TimeoutExpired:
            _explain(f"the measurement was not finished after {most_wall_s:g} s")
            return None
    if done.returncode != 0:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        _explain(last or f"its process ended with exit status {done.returncode}")
        return None
    return _parsed(json.loads(done.stdout))


def _explain(reason: str) -> None:
    logger.warning(
        "the speed of this machine was not measured: %s; this plan uses earlier or nominal rates", reason
    )


def _parsed(answer: dict[str, Any]) -> Measurement:
    refused = answer.pop("refused", None)
    if refused is not None:
        raise ConfigError(**refused)
    return Measurement(**answer | {"rates": Calibration(**answer["rates"])})


def _answer(device: str, folder: Path | None) -> dict[str, Any]:
    try:
        return dataclasses.asdict(measure(device, folder))
    except ConfigError as error:
        return {"refused": {"what": error.what, "where": error.where, "remedy": error.remedy}}


def main() -> None:
    """Print a measurement as JSON."""
    parent, device, threads, kernels, *folder = sys.argv[1:]
    end_with(int(parent))
    # The rates are those of a run, so the measurement has as many threads as the run.
    torch.set_num_threads(int(threads))
    # The system enforces this limit. The parent enforces that of wall time, which a user can raise.
    most_cpu_s = MOST_CPU_S * int(threads) + (0 if device == "cpu" else int(MOST_GPU_WALL_S))
    resource.setrlimit(resource.RLIMIT_CPU, (most_cpu_s, most_cpu_s))
    with context_of(cast(Kernels, kernels), device)():
        answer = _answer(device, Path(folder[0]) if folder else None)
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
