"""The interface of a queue of jobs."""

from __future__ import annotations

import codecs
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping

from headwater.appliance.types import Job, Priority, Submission
from headwater.core.errors import QueueError

_POLL_S = 0.2


class Queue(ABC):
    """Jobs of all users, as one user may see and change them.

    Every method raises `QueueError` where there is no such job, where it is another user's, or where it is
    over and nothing can change any more.
    """

    @abstractmethod
    def submit(self, submission: Submission, token: str) -> Job:
        """Put a job into the queue.

        Args:
            submission: the job.
            token: names this submission; given a second time it means the same job.

        Raises:
            ConfigError: if there are not so many CSXs.
            QueueError: if another job that is not over has its model_dir.
        """

    @abstractmethod
    def jobs(self, *, everything: bool = False) -> list[Job]:
        """The jobs that are not over, or all there ever were; the oldest first."""

    @abstractmethod
    def show(self, name: str) -> Job:
        """One job."""

    @abstractmethod
    def cancel(self, name: str) -> Job:
        """Ask a job to end, or, the second time, end it at once."""

    @abstractmethod
    def label(self, name: str, labels: Mapping[str, str | None]) -> Job:
        """Set labels of a job; `None` removes one."""

    @abstractmethod
    def set_priority(self, name: str, priority: Priority) -> Job:
        """Change the priority of a job that waits."""

    @abstractmethod
    def num_csx(self) -> int:
        """CSXs that there are."""

    def wait(self, name: str, timeout_s: float | None = None) -> Job:
        """The job when it is over.

        Raises:
            QueueError: if it is not after `timeout_s`.
        """
        end = None if timeout_s is None else time.monotonic() + timeout_s
        name = self.show(name).name  # a beginning of it may mean several jobs later
        while not (job := self.show(name)).phase.over:
            if end is not None and time.monotonic() > end:
                raise QueueError(f"job {name} is still {job.phase} after {timeout_s:g} s")
            time.sleep(_POLL_S)
        return job

    def logs(self, name: str, *, follow: bool = False) -> Iterator[str]:
        """What a job has printed; with `follow` also what it prints until it is over."""
        name = self.show(name).name
        position, decoder = 0, codecs.getincrementaldecoder("utf-8")("replace")
        while True:
            job = self.show(name)  # before its log is read: that of a job that is over is then whole
            try:
                with job.log.open("rb") as file:
                    file.seek(position)
                    while data := file.read(1 << 16):
                        yield decoder.decode(data)
                    position = file.tell()
            except FileNotFoundError:
                pass  # it has printed nothing yet
            except OSError as error:
                raise QueueError(
                    f"the log of job {name} cannot be read: {error.strerror}",
                    where=str(job.log),
                    remedy=f"it is a file of {job.user}, whose job it is",
                ) from error
            if job.phase.over or not follow:
                return
            time.sleep(_POLL_S)


def new_token() -> str:
    """Names a submission."""
    return uuid.uuid4().hex
