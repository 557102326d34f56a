"""The rates of the machine, which all tests and the processes that they start share.

A process checks stored rates again if they are older than ten minutes, which takes 0.7 s of a slow core. It
uses rates that were measured beside other programs, such as other tests, only for an hour. So the stored
rates stay recent while tests run: then hundreds of processes check nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path

_RENEWED_S = 200.0
"""Seconds between renewals. A test takes five minutes at most, so no rates become ten minutes old."""


class KnownRates:
    """The file of stored rates.

    Args:
        file: the file; it exists once a process has measured the machine.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._renewed_s = time.monotonic()

    def renew(self) -> None:
        """Set the time of stored rates to now, once in a while."""
        if time.monotonic() - self._renewed_s < _RENEWED_S:
            return
        self._renewed_s = time.monotonic()
        with contextlib.suppress(FileNotFoundError):
            entries = json.loads(self._file.read_text())
            for entry in entries.values():
                entry["taken_s"] = time.time()
            # Replaced at once, since other processes read the file.
            renewed = self._file.with_name(f"renewed-{os.getpid()}")
            renewed.write_text(json.dumps(entries))
            renewed.replace(self._file)
