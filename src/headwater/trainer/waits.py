"""A line that says what a run is doing while the user waits."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from headwater.core.patience import SILENCE_S
from headwater.fabric.fabric import ALONE, Fabric

logger = logging.getLogger(__name__)


@contextmanager
def log_if_long(what: str, fabric: Fabric = ALONE) -> Iterator[None]:
    """Log one line if the context takes longer than three seconds, on rank 0 alone.

    Args:
        what: the work, such as `writing the checkpoint`.
        fabric: the ranks of the run.
    """
    if fabric.rank != 0:
        yield
        return
    timer = threading.Timer(SILENCE_S, logger.info, ("%s …", what))
    timer.daemon = True  # a process that ends before must not wait for the line
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
