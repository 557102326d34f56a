"""The folder of an embedded queue: its files, owner and locks."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headwater.core.errors import QueueError
from headwater.core.users import user_name

ENVIRONMENT = "HEADWATER_QUEUE_DIR"
MACHINE = Path("/var/lib/headwater/queue")
"""Folder of the queue that all users of a machine share."""


@dataclasses.dataclass(frozen=True)
class QueueFolder:
    """The paths of the files of an embedded queue.

    Attributes:
        path: the folder, absolute.
    """

    path: Path

    @property
    def database(self) -> Path:
        return self.path / "queue.sqlite"

    @property
    def socket(self) -> Path:
        """Socket for the requests of users other than the owner."""
        return self.path / "socket"

    @property
    def supervisor_lock(self) -> Path:
        """Lock file held by the running supervisor."""
        return self.path / "supervisor.lock"

    @property
    def start_lock(self) -> Path:
        """Lock file held by a process while it starts a supervisor."""
        return self.path / "start.lock"

    @property
    def job_locks(self) -> Path:
        """Lock file with one byte per job, held by the process that watches over the job."""
        return self.path / "jobs.lock"

    @property
    def supervisor_log(self) -> Path:
        return self.path / "supervisor.log"

    def open_supervisor_log(self) -> int:
        """Open the supervisor's log for appending, readable by the owner only; return its descriptor."""
        log = os.open(self.supervisor_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.fchmod(log, 0o600)  # an earlier version may have made it readable for all
        return log

    def job_folder(self, job: str) -> Path:
        """Return the folder for the log of a job that has no model_dir."""
        return self.path / "logs" / job

    @property
    def exists(self) -> bool:
        """True if the folder exists and this user can see it."""
        return os.access(self.path, os.F_OK)

    @property
    def owned(self) -> bool:
        """True if the folder belongs to this user."""
        return self.path.stat().st_uid == os.geteuid()

    @property
    def shared(self) -> bool:
        """True if the queue accepts requests of other users."""
        return os.access(self._mark, os.F_OK)

    @property
    def _mark(self) -> Path:
        return self.path / "shared"

    def create(self, *, shared: bool = False) -> None:
        """Create the folder, or check that only its owner can write to an existing one.

        Args:
            shared: true to accept requests of other users from now on.

        Raises:
            QueueError: if the folder cannot be created, belongs to another user, or other users can write to
                it. They could then run commands as this user.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.mkdir(mode=0o700, exist_ok=True)
            if not self.owned:
                raise self.not_ours()
            # An existing folder keeps its mode, so it is checked.
            if self.path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise QueueError(
                    "other users can write to the folder of the queue",
                    where=str(self.path),
                    remedy=f"run: chmod go-w {self.path}; or name another folder",
                )
            (self.path / "logs").mkdir(mode=0o700, exist_ok=True)
            if shared:
                self._mark.touch()
                for folder in (self.path, self.path / "logs"):
                    folder.chmod(folder.stat().st_mode | stat.S_IXGRP | stat.S_IXOTH)
        except OSError as error:
            raise QueueError(
                f"the folder of the queue cannot be created: {error.strerror}",
                where=str(self.path),
                remedy="make the folder above it writable, or name another folder",
            ) from error

    def removed(self) -> QueueError:
        """Return the error for a folder that was removed while a process used the queue."""
        return QueueError(
            "the folder of the queue was removed",
            where=str(self.path),
            remedy="running jobs continue; submit waiting jobs again",
        )

    def not_ours(self) -> QueueError:
        """Return the error for a folder of another user that is not shared."""
        return QueueError(
            f"the queue belongs to {user_name(self.path.stat().st_uid)}",
            where=str(self.path),
            remedy=f"name another folder with --queue_dir or {ENVIRONMENT}",
        )


def find_folder(given: Path | None = None, *, shared: bool = False) -> QueueFolder:
    """Return the folder of the queue to use.

    It is the first of these: `given`; HEADWATER_QUEUE_DIR; the machine's folder, if it exists or `shared` is
    set; the user's own folder.

    Args:
        given: a folder named by the user.
        shared: true if the queue is to be shared by all users.
    """
    named = given or os.environ.get(ENVIRONMENT)
    if named:
        return QueueFolder(Path(named).expanduser().absolute())
    if shared or MACHINE.is_dir():
        return QueueFolder(MACHINE)
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return QueueFolder(Path(state) / "headwater" / "queue")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file inside the context; block until it is free.

    The system releases the lock if the process ends.
    """
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        # A lock of `lockf` would end when this process closes any descriptor of the file.
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def is_locked(path: Path) -> bool:
    """True if a process holds the exclusive lock of a file."""
    if not path.exists():
        return False
    lock = os.open(path, os.O_RDONLY)
    try:
        # A shared lock: two processes that test at the same time must not block each other.
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(lock)
