"""The thread on which the leader of a host fetches stages for the host's other ranks."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from typing import final

from headwater.stream.slabs import SlabDirectory

_EVERY_S = 5e-4


@final
class WantServer:
    """Watches the slab directory on a thread, and calls a function while other ranks wait for stages.

    Args:
        directory: has the requests of all ranks.
        serve: called on the thread when there are requests.
    """

    def __init__(self, directory: SlabDirectory, serve: Callable[[], None]) -> None:
        self._directory = directory
        self._serve = serve
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headwater-serve", daemon=True)
        self._thread.start()
        # If Python ends while this thread frees garbage that includes a tensor, the process aborts.
        atexit.register(self._stop)

    def _run(self) -> None:
        while not self._closing.wait(_EVERY_S):
            # Without the lock: this runs 2,000 times a second, and a missed want is seen next time.
            if self._directory.wants():
                self._serve()

    def _stop(self) -> None:
        self._closing.set()
        self._thread.join()

    def close(self) -> None:
        """End the thread."""
        self._stop()
        atexit.unregister(self._stop)
