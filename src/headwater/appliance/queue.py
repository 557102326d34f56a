"""The interface of a queue of jobs."""

from __future__ import annotations

import codecs
import os
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping

from headwater.appliance.types import Job, Priority, Submission
from headwater.core.errors import QueueError

_POLL_S = 0.2
_BLOCK = 1 << 16


class Queue(ABC):
    """A queue of the jobs of all users, as one user sees it.

    Every method raises `QueueError` if the named job does not exist. The methods that change a job also raise
    it if the job belongs to another user or has ended.
    """

    @abstractmethod
    def submit(self, submission: Submission, token: str) -> Job:
        """Put a job into the queue and return it.

        Args:
            submission: the job.
            token: unique name of this submission. A second call with the same token returns the same job.

        Raises:
            ConfigError: if the job needs more CSXs than exist.
            QueueError: if another unfinished job uses its model_dir.
        """

    @abstractmethod
    def jobs(self, *, everything: bool = False) -> list[Job]:
        """Return the unfinished jobs, or with `everything` all jobs; the oldest first."""

    @abstractmethod
    def show(self, name: str) -> Job:
        """Return a job."""

    @abstractmethod
    def cancel(self, name: str) -> Job:
        """Ask a job to end (SIGTERM). If it was asked before, kill it. Return the job."""

    @abstractmethod
    def label(self, name: str, labels: Mapping[str, str | None]) -> Job:
        """Set labels of a job and return it; the value `None` removes a label."""

    @abstractmethod
    def set_priority(self, name: str, priority: Priority) -> Job:
        """Change the priority of a waiting job and return it."""

    @abstractmethod
    def num_csx(self) -> int:
        """Return the number of CSXs that the queue manages."""

    @abstractmethod
    def read_log(self, job: Job, position: int) -> bytes:
        """Return the output of a job from byte `position` on, or the beginning of this part if it is long.

        A negative position counts from the end. Returns empty bytes until more output is written.

        Raises:
            QueueError: if the log cannot be read.
        """

    def wait(self, name: str, timeout_s: float | None = None) -> Job:
        """Block until a job is over, and return it.

        Raises:
            QueueError: if it is not over after `timeout_s` seconds.
        """
        end = None if timeout_s is None else time.monotonic() + timeout_s
        name = self.show(name).name  # the full name: a prefix may match several jobs later
        while not (job := self.show(name)).phase.over:
            if end is not None and time.monotonic() > end:
                raise QueueError(
                    f"job {name} is still {job.phase} after {timeout_s:g} s",
                    remedy="wait with a larger timeout_s, or cancel the job",
                )
            time.sleep(_POLL_S)
        return job

    def logs(self, name: str, *, follow: bool = False) -> Iterator[str]:
        """Yield the output of a job; with `follow`, until the job is over."""
        name = self.show(name).name
        position, decoder = 0, codecs.getincrementaldecoder("utf-8")("replace")
        while True:
            # The job is read before its log. If the job is over, the log that is read next is complete.
            job = self.show(name)
            while data := self.read_log(job, position):
                position += len(data)
                # The decoder is incremental, because a block may end within a character.
                yield decoder.decode(data)
            if job.phase.over or not follow:
                return
            time.sleep(_POLL_S)


def read_local_log(job: Job, position: int) -> bytes:
    """Return at most 64 KiB of the log of a job on this machine; see `Queue.read_log`.

    Raises:
        QueueError: if the log cannot be read.
    """
    try:
        # Each call opens the file again, because the job may create it later, on another machine.
        with job.log.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(position if position >= 0 else max(size + position, 0))
            return file.read(_BLOCK)
    except FileNotFoundError:
        return b""  # the job has not printed anything yet
    except OSError as error:
        raise QueueError(
            f"the log of job {job.name} cannot be read: {error.strerror}",
            where=str(job.log),
            remedy=f"ask {job.user}, the owner of the job",
        ) from error


def new_token() -> str:
    """Return a unique name for a submission."""
    return uuid.uuid4().hex
