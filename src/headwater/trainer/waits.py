"""A line that says what a run is doing while the user waits."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from headwater.fabric.fabric import ALONE, Fabric

logger = logging.getLogger(__name__)

_AFTER_S = 3.0


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
    timer = threading.Timer(_AFTER_S, logger.info, ("%s …", what))
    timer.daemon = True  # a process that ends within the three seconds must not wait for the line
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
