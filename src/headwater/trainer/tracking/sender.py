"""A thread that sends the numbers of a run to a service, so that a slow service never delays a step."""

from __future__ import annotations

import contextlib
import logging
import queue
import re
import threading
import time
from collections.abc import Callable
from typing import final

from headwater.core.errors import ConfigError
from headwater.trainer.tracking.service import Record, ServiceRun, Summary

logger = logging.getLogger(__name__)

_OPEN_S, _END_S, _RETRY_S = 30.0, 60.0, 30.0
_MOST_RECORDS = 10_000
"""Largest number of records that wait for the thread, and of those that the thread keeps for a retry."""


@final
class Sender:
    """Sends records to one run of a service. Only the first failure is logged; the sender tries again later.

    Args:
        name: name of the logger in the warning.
        open_run: opens the run. The thread calls it.
    """

    def __init__(self, name: str, open_run: Callable[[], ServiceRun]) -> None:
        self._name = name
        self._open_run = open_run
        self._run: ServiceRun | None = None
        self._refusal: ConfigError | None = None
        self._waiting: queue.Queue[Record | Summary] = queue.Queue(_MOST_RECORDS)
        self._has_failed = False
        self._retry_at = 0.0
        self._tried = threading.Event()
        # A daemon: a service that does not answer must not keep the process from ending.
        self._thread = threading.Thread(target=self._work, name=f"headwater-{name}", daemon=True)

    def start(self) -> None:
        """Open the run, and wait at most 30 s for an answer of the service.

        Raises:
            ConfigError: if the service refuses the settings.
        """
        self._thread.start()
        # The wait is limited: wrong settings are reported before the first step, but a slow service must not
        # delay the run.
        self._tried.wait(_OPEN_S)
        if self._refusal is not None:
            raise self._refusal

    def send(self, record: Record) -> None:
        """Pass a record to the thread, which sends it soon."""
        try:
            self._waiting.put_nowait(record)
        except queue.Full:
            self._warn("the service is too slow: some steps are not sent")

    def finish(self, summary: Summary) -> None:
        """Send the summary and close the run. Return after 60 s even if the service does not answer."""
        end = time.monotonic() + _END_S
        with contextlib.suppress(queue.Full):
            self._waiting.put(summary, timeout=_END_S)
        self._thread.join(max(end - time.monotonic(), 0.0))
        if self._thread.is_alive():
            self._warn(f"the last numbers were not sent within {_END_S:.0f} s")

    def _work(self) -> None:
        records: list[Record] = []
        summary: Summary | None = None
        while True:
            if summary is not None or time.monotonic() >= self._retry_at:
                records = self._try_to_send(records, summary)
                self._tried.set()
            if summary is not None or self._refusal is not None:
                return
            summary = self._collect(records)
            # While the service does not answer, only the newest records are kept.
            del records[:-_MOST_RECORDS]

    def _try_to_send(self, records: list[Record], summary: Summary | None) -> list[Record]:
        """Send records and, at the end, the summary. Return the records that were not sent."""
        try:
            self._run = self._run or self._open_run()
            self._run.log(records)
            records = []
            if summary is not None:
                self._run.finish(summary)
        except ConfigError as error:
            self._refusal = error
            if self._tried.is_set():  # `start` has returned and cannot raise the error
                self._warn(str(error))
        except Exception as error:  # noqa: BLE001 - each package raises other errors
            self._warn(reason(error))
            self._retry_at = time.monotonic() + _RETRY_S
        return records

    def _collect(self, records: list[Record]) -> Summary | None:
        """Block until there is something to send; add the records, and return the summary if it came."""
        found = self._waiting.get()
        while isinstance(found, Record):
            records.append(found)
            try:
                found = self._waiting.get_nowait()
            except queue.Empty:
                return None
        return found

    def _warn(self, text: str) -> None:
        if not self._has_failed:
            self._has_failed = True
            logger.warning("%s: %s; the training continues", self._name, text)


def reason(error: Exception) -> str:
    """Return the first line of an error, without the passwords of addresses."""
    lines = str(error).strip().splitlines() or [""]
    text = re.sub(r"//[^/@\s]+@", "//…@", lines[0])
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
