"""This machine as a cluster file: one host, as it was measured, to be made a cluster of."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import yaml

from headwater.core.errors import ConfigError
from headwater.core.precision import PrecisionName
from headwater.plan.predict import ADAMW_BYTES
from headwater.plan.types import Calibration, Resources

_PRECISIONS: tuple[PrecisionName, ...] = ("fp32", "bf16", "fp16")


def write_machine(path: Path, rates: Calibration, free: Resources, device: str) -> None:
    """Write a cluster file of this machine.

    Args:
        path: the file, which must not be there yet.
        rates: as measured.
        free: what a run may take, every budget set that applies.
        device: `cpu` or `cuda`.

    Raises:
        ConfigError: if there is such a file, or it cannot be written.
    """
    try:
        with path.open("x", encoding="utf-8") as file:
            yaml.safe_dump(machine_document(rates, free, device), file, sort_keys=False)
    except OSError as error:
        raise ConfigError(
            f"the cluster file cannot be written: {error.strerror}",
            where=str(path),
            remedy="name a file that is not there yet, in a folder that can be written to",
        ) from error


def machine_document(rates: Calibration, free: Resources, device: str) -> dict[str, Any]:
    """What the file says."""
    # On a GPU's machine nothing but the update measures the host's memory, and that is bound by it.
    memory_rate = rates.memory_bytes_per_s if device == "cpu" else ADAMW_BYTES * rates.adamw_params_per_s
    host: dict[str, Any] = {
        "ranks": len(os.sched_getaffinity(0)) if device == "cpu" else torch.cuda.device_count(),
        "memory": {
            "size": free.host_memory,
            "bytes_per_s": memory_rate,
            "adamw_params_per_s": rates.adamw_params_per_s,
        },
        "flops_per_s": {name: rates.flops_per_s(name) for name in _PRECISIONS},
        "saved_bytes_per_s": {name: rates.saved_bytes_per_s(name) for name in _PRECISIONS},
    }
    if device != "cpu":
        host["accelerator"] = {"memory": free.device_memory, "link_bytes_per_s": rates.link_bytes_per_s}
    if free.disk is not None:
        host["disk"] = {
            "size": free.disk_bytes,
            "read_bytes_per_s": rates.disk_read_bytes_per_s,
            "write_bytes_per_s": rates.disk_write_bytes_per_s,
        }
    description = "This machine, as headwater plan measured it. For several, raise hosts and add a network."
    return {"description": description, "hosts": 1, "host": host}
