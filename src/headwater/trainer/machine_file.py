"""Writes this machine as a cluster file: one host with its measured rates, to be extended to a cluster."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import torch
import yaml

from headwater.core.errors import ConfigError
from headwater.core.precision import PrecisionName
from headwater.plan.rates import ADAMW_BYTES, Calibration
from headwater.plan.types import Resources

_PRECISIONS: tuple[PrecisionName, ...] = ("fp32", "bf16", "fp16")


def write_machine(path: Path, rates: Calibration, free: Resources, device: str) -> None:
    """Write a cluster file of this machine.

    Args:
        path: the file, which must not exist.
        rates: measured rates.
        free: resources that a run may use, with a value for every budget that applies.
        device: `cpu` or `cuda`.

    Raises:
        ConfigError: if the file exists or cannot be written.
    """
    try:
        # Mode "x" never overwrites a cluster file, because a user may have extended it by hand.
        with path.open("x", encoding="utf-8") as file:
            yaml.safe_dump(machine_document(rates, free, device), file, sort_keys=False)
    except OSError as error:
        raise _not_written(path, error) from error


def refuse_unwritable(path: Path) -> None:
    """Raise `ConfigError` if `path` exists or its folder does not, so that no cluster file can be written."""
    if os.path.lexists(path):
        raise _not_written(path, FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)))
    if not path.parent.is_dir():
        raise _not_written(path, FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)))


def _not_written(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"the cluster file cannot be written: {error.strerror}",
        where=str(path),
        remedy="name a file that does not exist, in a folder that can be written to",
    )


def machine_document(rates: Calibration, free: Resources, device: str) -> dict[str, Any]:
    """Return the content of a cluster file that describes this machine."""
    # On a machine with a GPU only the update is measured in host memory; its rate is bound by that memory.
    memory_rate = rates.memory_bytes_per_s if device == "cpu" else ADAMW_BYTES * rates.adamw_params_per_s
    host: dict[str, Any] = {
        "ranks": len(os.sched_getaffinity(0)) if device == "cpu" else torch.cuda.device_count(),
        "memory": {
            "size": free.host_memory,
            "bytes_per_s": memory_rate,
            "adamw_params_per_s": rates.adamw_params_per_s,
        },
        "flops_per_s": {name: rates.flops_per_s(name) for name in _PRECISIONS},
        "attention_flops_per_s": _attention_rates(rates),
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
    description = "This machine, as headwater plan measured it. For a cluster raise hosts and add a network."
    return {"description": description, "hosts": 1, "host": host}


def _attention_rates(rates: Calibration) -> dict[PrecisionName, float]:
    """Return the rates of attention by precision; in bf16 that of the package's kernel if it is used."""
    found: dict[PrecisionName, float] = {name: rates.attention_flops_per_s(name) for name in _PRECISIONS}
    if rates.kernel_attention_flops_per_s is not None:
        found["bf16"] = rates.kernel_attention_flops_per_s
    return found
