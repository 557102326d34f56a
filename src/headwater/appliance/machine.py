"""The CSXs of one machine: which cores and which GPU each of them is."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headwater.core.errors import ConfigError

_DEVICES = Path("/dev")


@dataclasses.dataclass(frozen=True)
class Slot:
    """A place for one compute rank.

    Attributes:
        number: of the CSX.
        cores: on which it computes.
        gpu: on which it computes, as CUDA_VISIBLE_DEVICES names it.
    """

    number: int
    cores: tuple[int, ...]
    gpu: str | None = None

    @property
    def name(self) -> str:
        """As the column SYSTEMS has it."""
        return slot_name(self.number)


def slot_name(number: int) -> str:
    """The name of a CSX."""
    return f"csx-{number}"


def find_slots(num_csx: int | None = None) -> list[Slot]:
    """The CSXs of this machine: each GPU is one, or, where there is none, each core.

    Cores are divided among them.

    Args:
        num_csx: how many there shall be; with more than there are cores, some share one.

    Raises:
        ConfigError: if there cannot be so many.
    """
    cores, gpus = sorted(os.sched_getaffinity(0)), _gpus()
    number = num_csx or len(gpus) or len(cores)
    if gpus and number > len(gpus):
        raise ConfigError(
            f"{number} CSXs are asked for, and there are {len(gpus)} GPUs",
            remedy=f"write at most {len(gpus)}",
        )
    return [
        Slot(index, _share(cores, index, number), gpus[index] if gpus else None) for index in range(number)
    ]


def _share(cores: Sequence[int], index: int, number: int) -> tuple[int, ...]:
    if number > len(cores):
        return (cores[index % len(cores)],)
    return tuple(cores[index * len(cores) // number : (index + 1) * len(cores) // number])


def _gpus() -> list[str]:
    """The GPUs, as CUDA_VISIBLE_DEVICES names them; found without torch, for which a queue need not wait."""
    names = [str(index) for index, _ in enumerate(_DEVICES.glob("nvidia[0-9]*"))]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return names
    return [name.strip() for name in visible.split(",") if name.strip()][: len(names)]


def job_environment(slots: Sequence[Slot]) -> dict[str, str]:
    """What tells a job which CSXs it has."""
    told = {"HEADWATER_CSX": ",".join(str(slot.number) for slot in slots)}
    gpus = [slot.gpu for slot in slots if slot.gpu is not None]
    return {**told, "CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else told


def job_cores(slots: Sequence[Slot]) -> set[int]:
    """The cores of a job."""
    return {core for slot in slots for core in slot.cores}


def slots_to_record(slots: Sequence[Slot]) -> list[dict[str, Any]]:
    """As JSON has them."""
    return [dataclasses.asdict(slot) for slot in slots]


def slots_from_record(record: Sequence[dict[str, Any]]) -> list[Slot]:
    """What `slots_to_record` gave."""
    return [Slot(**{**one, "cores": tuple(one["cores"])}) for one in record]
