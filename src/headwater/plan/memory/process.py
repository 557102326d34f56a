"""Bytes for moments other than the steps of a plan: steps of other models, and the filling of the store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

from headwater.plan.types import OthersBytes, ProcessMemory
from headwater.store.layout import RETURNED_BYTES

_OTHERS, _INITIAL = "other models", "initial weights"

OTHER_MOMENTS = (_OTHERS, _INITIAL)
"""Names of the parts of a plan's bytes that its own steps do not need."""


def bytes_in_step(parts: Mapping[str, int]) -> int:
    """Return the bytes that a model occupies during its steps only.

    Gradients do not count: they may wait for the steps of other models.

    Args:
        parts: the predicted bytes by purpose.
    """
    return sum(parts.get(part, 0) for part in ("activations", "allocator", "masking"))


@final
class ProcessParts:
    """Counts the memory that a plan needs beside its own steps, and the memory of the program.

    Attributes:
        program: bytes of the interpreters and libraries of all ranks.

    Args:
        process: memory of each rank that belongs to models.
        base_bytes: host memory that each rank occupies already.
        ranks: number of ranks on this host.
    """

    def __init__(self, process: ProcessMemory, base_bytes: int, ranks: int) -> None:
        self.program = ranks * max(0, base_bytes - process.initial - process.waiting)
        beyond = process.host.beyond(self.program)
        self._on_host = OthersBytes(beyond.held + ranks * process.waiting, beyond.in_step)
        self._on_device = process.device
        self._initial = ranks * process.initial

    @property
    def has_initial_weights(self) -> bool:
        """True if weights are in memory before the store is filled."""
        return self._initial > 0

    def held_by_others(self, *, on_device: bool) -> int:
        """Return the bytes of one kind of memory that other models occupy during the steps of a plan."""
        return (self._on_device if on_device else self._on_host).held

    def with_others(self, parts: dict[str, int], *, on_device: bool) -> dict[str, int]:
        """Return the bytes of a plan by purpose, with those that must stay free for other models."""
        others = self._on_device if on_device else self._on_host
        beside = others.beside(bytes_in_step(parts))
        return parts | {_OTHERS: beside} if beside else parts

    def with_initial_weights(
        self, parts: dict[str, int], values: Sequence[int], in_step: int
    ) -> dict[str, int]:
        """Return `parts` with the bytes that the filling of the store needs beyond those of a step.

        Args:
            parts: the bytes of host memory by purpose.
            values: bytes of the masters of each stage that is stored in host memory.
            in_step: the bytes of `parts` without the program and its data workers.
        """
        # The memory of the first stages is free when that of the last ones is filled.
        weights = max(self._initial, sum(values))
        not_returned = min(self._initial, RETURNED_BYTES + max(values, default=0))
        buffers = sum(parts.get(part, 0) for part in ("slabs", "staging"))
        missing = weights + not_returned + buffers - in_step
        return parts | {_INITIAL: missing} if missing > 0 else parts
