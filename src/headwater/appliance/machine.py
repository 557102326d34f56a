"""The CSXs of one machine, each with its cores and its GPU."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headwater.core.placement import check_csx_limit

_DEVICES = Path("/dev")


@dataclasses.dataclass(frozen=True)
class Slot:
    """A CSX of this machine: the place for one compute rank.

    Attributes:
        number: number of the CSX, from 0.
        cores: the CPU cores on which the rank runs.
        gpu: the rank's GPU, as CUDA_VISIBLE_DEVICES names it; `None` for a CPU rank.
    """

    number: int
    cores: tuple[int, ...]
    gpu: str | None = None

    @property
    def name(self) -> str:
        """Name of the CSX, as in the column SYSTEMS."""
        return slot_name(self.number)


def slot_name(number: int) -> str:
    """Return the name of a CSX."""
    return f"csx-{number}"


def find_slots(num_csx: int | None = None) -> list[Slot]:
    """Return the CSXs of this machine, with its cores divided among them.

    Args:
        num_csx: number of CSXs; if `None`, the number of GPUs, or of cores without a GPU. If it is larger
            than the number of cores, several CSXs share a core.

    Raises:
        ConfigError: if the machine has GPUs, but fewer than `num_csx`.
    """
    cores, gpus = sorted(os.sched_getaffinity(0)), _gpus()
    number = num_csx or len(gpus) or len(cores)
    if gpus:
        check_csx_limit(number, len(gpus), "GPUs of this machine", where="num_csx")
    return [
        Slot(index, _share(cores, index, number), gpus[index] if gpus else None) for index in range(number)
    ]


def _share(cores: Sequence[int], index: int, number: int) -> tuple[int, ...]:
    if number > len(cores):
        # More CSXs than cores: they share cores in turn.
        return (cores[index % len(cores)],)
    return tuple(cores[index * len(cores) // number : (index + 1) * len(cores) // number])


def _gpus() -> list[str]:
    """Return the GPUs, as CUDA_VISIBLE_DEVICES names them, without the slow import of torch."""
    names = [str(index) for index, _ in enumerate(_DEVICES.glob("nvidia[0-9]*"))]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return names
    chosen = [name.strip() for name in visible.split(",")]
    # CUDA ignores an invalid name and all names after it. `-1` is the usual way to hide all GPUs.
    return list(itertools.takewhile(lambda name: name and not name.startswith("-"), chosen))[: len(names)]


def job_environment(slots: Sequence[Slot]) -> dict[str, str]:
    """Return the environment variables that tell a job its CSXs and GPUs."""
    csx = {"HEADWATER_CSX": ",".join(str(slot.number) for slot in slots)}
    gpus = [slot.gpu for slot in slots if slot.gpu is not None]
    return {**csx, "CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else csx


def job_cores(slots: Sequence[Slot]) -> set[int]:
    """Return the cores of a job."""
    return {core for slot in slots for core in slot.cores}


def slots_to_record(slots: Sequence[Slot]) -> list[dict[str, Any]]:
    """Convert slots to values that JSON can represent."""
    return [dataclasses.asdict(slot) for slot in slots]


def slots_from_record(record: Sequence[dict[str, Any]]) -> list[Slot]:
    """Convert the result of `slots_to_record` back to slots."""
    return [Slot(**{**one, "cores": tuple(one["cores"])}) for one in record]
