"""The folder of an embedded queue: its files, and whose it is."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import pwd
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headwater.core.errors import QueueError

ENVIRONMENT = "HEADWATER_QUEUE_DIR"
MACHINE = Path("/var/lib/headwater/queue")
"""The queue that all users of a machine share."""


@dataclasses.dataclass(frozen=True)
class QueueFolder:
    """Where each file of an embedded queue lies.

    Attributes:
        path: the folder, absolute.
    """

    path: Path

    @property
    def database(self) -> Path:
        return self.path / "queue.sqlite"

    @property
    def socket(self) -> Path:
        """Where other users than the owner ask."""
        return self.path / "socket"

    @property
    def supervisor_lock(self) -> Path:
        """Held by the supervisor."""
        return self.path / "supervisor.lock"

    @property
    def start_lock(self) -> Path:
        """Held by whoever starts a supervisor."""
        return self.path / "start.lock"

    @property
    def job_locks(self) -> Path:
        """Held, a byte for each job, by the process that watches over the job."""
        return self.path / "jobs.lock"

    @property
    def supervisor_log(self) -> Path:
        return self.path / "supervisor.log"

    def open_supervisor_log(self) -> int:
        """Return the supervisor's log, open to append; other users may not read it."""
        log = os.open(self.supervisor_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.fchmod(log, 0o600)  # an earlier version may have made it readable for all
        return log

    def job_folder(self, job: str) -> Path:
        """Where the log of a job goes that has no model_dir."""
        return self.path / "logs" / job

    @property
    def exists(self) -> bool:
        """Whether it is there, as far as this user can see."""
        return os.access(self.path, os.F_OK)

    @property
    def owned(self) -> bool:
        """Whether this user may read and write its files."""
        return self.path.stat().st_uid == os.geteuid()

    @property
    def shared(self) -> bool:
        """Whether other users may ask."""
        return os.access(self._mark, os.F_OK)

    @property
    def _mark(self) -> Path:
        return self.path / "shared"

    def create(self, *, shared: bool = False) -> None:
        """Make the folder, or see that nobody else can write there.

        Args:
            shared: other users may ask from now on.

        Raises:
            QueueError: if others can write there: they could have their own jobs run as this user.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.mkdir(mode=0o700, exist_ok=True)
            if not self.owned:
                raise self.not_ours()
            if self.path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise QueueError(
                    "others may write to the folder of the queue",
                    where=str(self.path),
                    remedy="chmod go-w it, or name another folder",
                )
            (self.path / "logs").mkdir(mode=0o700, exist_ok=True)
            if shared:
                self._mark.touch()
                for folder in (self.path, self.path / "logs"):
                    folder.chmod(folder.stat().st_mode | stat.S_IXGRP | stat.S_IXOTH)
        except OSError as error:
            raise QueueError(f"no queue can be here: {error.strerror}", where=str(self.path)) from error

    def not_ours(self) -> QueueError:
        """The error for a folder of another user that is not shared."""
        return QueueError(
            f"the queue belongs to {user_name(self.path.stat().st_uid)}",
            where=str(self.path),
            remedy=f"name another folder with --queue_dir or {ENVIRONMENT}",
        )


def find_folder(given: Path | None = None, *, shared: bool = False) -> QueueFolder:
    """The folder that is named, or that of the machine where there is or shall be one, or the user's own."""
    named = given or os.environ.get(ENVIRONMENT)
    if named:
        return QueueFolder(Path(named).expanduser().absolute())
    if shared or MACHINE.is_dir():
        return QueueFolder(MACHINE)
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return QueueFolder(Path(state) / "headwater" / "queue")


def user_name(uid: int) -> str:
    """The name of a user, or his number where he has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Waits for the lock of a file and holds it; the system frees it when the process ends."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def is_held(path: Path) -> bool:
    """Whether somebody holds the lock of a file; several may ask at once."""
    if not path.exists():
        return False
    lock = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(lock)
