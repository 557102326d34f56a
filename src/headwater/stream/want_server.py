"""The thread on which the leader of a host fetches stages for the host's other ranks."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from typing import final

from headwater.stream.slabs import SlabDirectory, reason

_EVERY_S = 5e-4


@final
class WantServer:
    """Watches the slab directory on a thread, and calls a function while other ranks wait for stages.

    If the function raises, the thread ends. Then the ranks that wait raise an error, and so does `check`.

    Args:
        directory: has the requests of all ranks.
        serve: called on the thread when there are requests.
    """

    def __init__(self, directory: SlabDirectory, serve: Callable[[], None]) -> None:
        self._directory = directory
        self._serve = serve
        self._closing = threading.Event()
        self._failure: Exception | None = None
        self._failing = threading.Lock()  # held while the error is set in the directory and in `_failure`
        self._thread = threading.Thread(target=self._run, name="headwater-serve", daemon=True)
        self._thread.start()
        # If Python ends while this thread frees garbage that includes a tensor, the process aborts.
        atexit.register(self._stop)

    def _run(self) -> None:
        try:
            while not self._closing.wait(_EVERY_S):
                # This read needs no lock: it runs 2,000 times a second, so a missed want is seen next time.
                if self._directory.wants():
                    self._serve()
        except Exception as error:  # noqa: BLE001 - `check` raises it
            with self._failing:
                # The directory is told first: `check` may end this rank before the others learn the reason.
                self._directory.fail(f"the first rank of this host cannot fetch stages: {reason(error)}")
                self._failure = error

    def check(self) -> None:
        """Raise the error that has ended the thread, if there is one."""
        with self._failing:
            if self._failure is not None:
                raise self._failure

    def _stop(self) -> None:
        self._closing.set()
        self._thread.join()

    def close(self) -> None:
        """End the thread."""
        self._stop()
        atexit.unregister(self._stop)
