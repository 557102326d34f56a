"""Following of a job on an appliance: its log as it is written, and its artifacts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from headwater.appliance.remote.connection import Connection
from headwater.appliance.remote.mirror import Mirror
from headwater.appliance.types import Job, Phase
from headwater.core.errors import QueueError

_WAIT_S, _COPY_S = 1.0, 0.5
_TRIES = 10


class Follower:
    """Follows one job. `run` may be called again after an exception, and continues at the same byte.

    Args:
        connection: to the appliance.
        name: the name of the job.
        write: receives the bytes of the log, in order.
        mirror: copies the artifacts; `None` to copy nothing.
        on_phase: called with the job when its phase changes.
    """

    def __init__(
        self,
        connection: Connection,
        name: str,
        write: Callable[[bytes], None],
        mirror: Mirror | None = None,
        on_phase: Callable[[Job], None] = lambda job: None,
    ) -> None:
        self._connection = connection
        self._name = name
        self._write = write
        self._mirror = mirror
        self._on_phase = on_phase
        self._position = 0
        self._phase: Phase | None = None
        self._copying: Iterator[None] | None = None

    def run(self) -> Job:
        """Block until the job is over and all its artifacts are copied; return the job.

        If another process copies to the same folder, also block until that process has ended.

        Raises:
            QueueError: if the connection cannot be made again, or the artifacts still change after the end.
            StoreError: if a file cannot be written.
        """
        is_behind = True
        while True:
            job, is_more = self._look(0 if is_behind else _WAIT_S)
            if job.phase.over and not is_more:
                break
            is_behind = self._copy_some() or is_more
        self._copy_rest()
        return job

    def _look(self, wait_s: float) -> tuple[Job, bool]:
        """Write the next part of the log; return the job, and true if the log may have further parts."""
        frame = self._connection.ask(
            "watch", name=self._name, position=self._position, phase=self._phase, wait_s=wait_s
        )
        answer: dict[str, Any] = frame.header["answer"]
        job = Job.from_record(answer["job"])
        if frame.body:
            # The part is counted before it is written, so that it is not repeated after an interruption.
            self._position += len(frame.body)
            self._write(frame.body)
        if job.phase != self._phase:
            self._phase = job.phase
            self._on_phase(job)
        return job, bool(frame.body)

    def _copy_some(self) -> bool:
        """Copy artifacts for a short time; return true if more are to be copied at once."""
        if self._mirror is None:
            return False
        end = time.monotonic() + _COPY_S
        self._copying = self._copying or self._mirror.copy_changes()
        for _ in self._copying:
            if time.monotonic() > end:
                return True
        self._copying = None
        return False

    def _copy_rest(self) -> None:
        if self._mirror is None:
            return
        tries = 0
        while tries < _TRIES:
            # A pass that begins now sees the last state of every file.
            for _ in self._mirror.copy_changes():
                pass
            if self._mirror.is_whole:
                return
            tries += not self._mirror.is_waiting
            time.sleep(_WAIT_S)
        raise QueueError(
            f"the artifacts of job {self._name} still change after its end",
            remedy=f"later run: headwater jobs attach {self._name}",
        )
