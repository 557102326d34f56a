"""Watches the memory of a run, and stops it with a checkpoint before the kernel would kill it."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from headwater.core.tensor_memory import return_free_memory
from headwater.core.units import MIB, format_bytes
from headwater.plan.cgroups import memory_levels
from headwater.plan.machine import held_bytes
from headwater.trainer.interrupt import Interrupt

_INTERVAL_S = 0.25
"""Seconds between two checks. Memory can fill up within a second."""
_LEAST_SHARE, _LEAST_BYTES, _MOST_BYTES = 0.03, 16 * MIB, 256 * MIB
"""Memory is short if less than this fraction of the limit is free, but at least and at most these bytes."""
_TOLERANCE = 1.03
"""A run that takes more than this many times its memory budget gets a warning."""

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class FreeMemory:
    """Free memory and limit of the machine or of a container, in bytes."""

    free: int
    limit: int

    @property
    def is_short(self) -> bool:
        """True if so little memory is free that the next large tensor may not fit."""
        least = max(_LEAST_BYTES, min(_MOST_BYTES, int(_LEAST_SHARE * self.limit)))
        return self.free < least


def least_free_memory() -> FreeMemory:
    """Return the free memory of the container or machine, whichever is less. Cached files count as free."""
    machine = psutil.virtual_memory()
    levels = [FreeMemory(level.limit - level.held, level.limit) for level in memory_levels()]
    return min((FreeMemory(machine.available, machine.total), *levels), key=lambda memory: memory.free)


@contextmanager
def memory_watch(interrupt: Interrupt, budget: int | None) -> Iterator[None]:
    """Ask the run to stop when memory runs short, and warn once if the run exceeds its budget.

    Args:
        interrupt: gets the request to stop the run after its step.
        budget: bytes of host memory that the run may hold; `None`: no limit.
    """
    over = threading.Event()
    watch = threading.Thread(target=_watch, args=(interrupt, budget, over), name="memory-watch", daemon=True)
    watch.start()
    try:
        yield
    finally:
        over.set()
        watch.join()


def _watch(interrupt: Interrupt, budget: int | None, over: threading.Event) -> None:
    may_warn = budget is not None
    while not over.wait(_INTERVAL_S):
        if may_warn and budget is not None and (held := held_bytes()) > _TOLERANCE * budget:
            may_warn = False
            logger.warning(
                "this run holds %s of host memory, its budget is %s", format_bytes(held), format_bytes(budget)
            )
        # After the request nothing more can be done until the step ends.
        if not interrupt.requested and least_free_memory().is_short:
            # Memory may only seem short: malloc keeps pages that the run has freed.
            return_free_memory()
            memory = least_free_memory()
            if memory.is_short:
                interrupt.requested = True
                logger.warning(
                    "stopping after this step with a checkpoint: %s of %s of memory are free; set a smaller "
                    "host_memory, or give the run more memory",
                    format_bytes(max(0, memory.free)),
                    format_bytes(memory.limit),
                )
