"""The supervisor, which allocates the CSXs of this machine to waiting jobs. A queue has one at a time.

All its state is in the database. If it is killed at any instant, the next supervisor continues.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType

from headwater.appliance.database import Database, job_name
from headwater.appliance.folder import QueueFolder, is_locked, locked
from headwater.appliance.job_processes import kill_processes
from headwater.appliance.machine import slot_name
from headwater.appliance.schedule import Request, choose_slots, schedule
from headwater.appliance.server import serving
from headwater.appliance.types import Phase, Priority
from headwater.appliance.watcher import try_lock
from headwater.core.errors import QueueError
from headwater.core.files import is_at
from headwater.core.placement import wrong_num_csx
from headwater.core.signals import handled

logger = logging.getLogger(__name__)

_TICK_S, _LOOK_S = 0.1, 1.0
"""Seconds between checks whether anything has changed, and the most seconds between checks of all jobs."""
_START_TIMEOUT_S = 30.0
_TRIES = 3
_IDLE_S = 60.0
"""Seconds without a job after which a supervisor in the background ends."""


def supervise(folder: QueueFolder, idle_s: float | None = None) -> None:
    """Run a supervisor until SIGTERM or Ctrl-C. Jobs that are running then continue.

    Args:
        folder: the queue's folder.
        idle_s: seconds without a job after which to return; `None` for no limit.

    Raises:
        QueueError: if the queue has another supervisor, or its folder was removed.
    """
    while True:
        lock = _take(folder)
        with closing(Database(folder)) as database:
            try:
                with serving(folder), _stopping() as stop:
                    Supervisor(database).run(stop, idle_s)
            finally:
                # This is before the query below. From now on a client starts a supervisor itself.
                os.close(lock)
            # A client that submitted a job before the release of the lock saw a running supervisor and did
            # not start one. So look for unfinished jobs after the release, and continue if there are any.
            if (
                stop.asked
                or not database.rows("SELECT 1 FROM jobs WHERE ended IS NULL")
                or is_locked(folder.supervisor_lock)
            ):
                return


class _Stop:
    """A flag that is set when a signal asks the supervisor to end."""

    def __init__(self) -> None:
        self.asked = False

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Set the flag; a signal handler."""
        self.asked = True


@contextmanager
def _stopping() -> Iterator[_Stop]:
    stop = _Stop()
    with handled(dict.fromkeys((signal.SIGINT, signal.SIGTERM), stop.handle)):
        yield stop


def _take(folder: QueueFolder) -> int:
    """Lock the queue for this supervisor, and return the descriptor of the lock file."""
    lock = os.open(folder.supervisor_lock, os.O_RDWR | os.O_CREAT, 0o600)
    # `is_locked` takes the lock for an instant, so one failure does not prove that another supervisor runs.
    end = time.monotonic() + 1
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            if time.monotonic() > end:
                os.close(lock)
                raise QueueError(
                    "another supervisor is running for this queue",
                    where=str(folder.path),
                    remedy="stop it first, or use the queue that it serves",
                ) from None
            time.sleep(_TICK_S / 10)


class Supervisor:
    """Decides which jobs start, and assigns CSXs of this machine to them.

    Args:
        database: the queue's database.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._watchers: dict[int, subprocess.Popen[bytes]] = {}
        self._tries: dict[int, int] = {}
        self._locks = os.open(database.folder.job_locks, os.O_RDWR | os.O_CREAT, 0o600)

    def run(self, stop: _Stop, idle_s: float | None) -> None:
        """Serve jobs until `stop` is set, or until there was no job for `idle_s` seconds.

        Raises:
            QueueError: if the folder of the queue was removed.
        """
        folder = self._database.folder
        changes, looked, busy = None, 0.0, time.monotonic()
        while not stop.asked:
            now = time.monotonic()
            ended = [watcher for watcher in self._watchers.values() if watcher.poll() is not None]
            if ended or changes != self._database.changes or now - looked > _LOOK_S:
                changes, looked = self._database.changes, now
                # The open database still works, but commands can no longer reach it.
                if not is_at(self._locks, folder.job_locks):
                    raise folder.removed()
                try:
                    if self.look():
                        busy = now
                except QueueError as error:  # for example a full disk, which may be temporary
                    logger.error("%s", error)
            if idle_s is not None and now - busy > idle_s:
                return
            time.sleep(_TICK_S)

    def look(self) -> bool:
        """Update the states of all jobs, and start those that can start. Return true if some are not over."""
        self._watchers = {number: one for number, one in self._watchers.items() if one.poll() is None}
        # This comes first, because it frees CSXs that `_give_slots` can give to other jobs.
        self._find_lost()
        self._admit()
        self._give_slots()
        self._start_watchers()
        return bool(self._numbers(*(phase for phase in Phase if not phase.over)))

    def _numbers(self, *phases: Phase) -> list[int]:
        marks = ", ".join("?" * len(phases))
        return [
            row["id"] for row in self._database.rows(f"SELECT id FROM jobs WHERE phase IN ({marks})", phases)
        ]

    def _find_lost(self) -> None:
        """Mark running jobs as failed if their watcher process is gone. Their exit codes are then unknown."""
        for number in self._numbers(Phase.RUNNING):
            if not try_lock(self._locks, number):
                continue
            # The lock is released at once: it was taken only to see that no watcher holds it.
            fcntl.lockf(self._locks, fcntl.LOCK_UN, 1, number)
            if number not in self._numbers(Phase.RUNNING):
                continue  # the watcher has recorded the end since the query
            # This comes before its CSXs are freed: the next job must not meet processes of this one.
            if not kill_processes(self._database.folder.path, job_name(number)):
                logger.warning("some processes of %s do not end", job_name(number))
            reason = "its watcher process was killed, or the machine was restarted"
            with self._database.transaction():
                self._database.finish(number, Phase.FAILED, reason, now=time.time())

    def _admit(self) -> None:
        """Queue new jobs, and fail those that need more CSXs than now exist."""
        num_csx = len(self._database.slots())
        with self._database.transaction():
            self._database.execute("UPDATE jobs SET phase = ? WHERE phase = ?", (Phase.QUEUED, Phase.CREATED))
            query = "SELECT id, num_csx FROM jobs WHERE phase = ? AND num_csx > ?"
            for row in self._database.rows(query, (Phase.QUEUED, num_csx)):
                reason = wrong_num_csx(row["num_csx"], num_csx, "CSXs of the machine")
                self._database.finish(row["id"], Phase.FAILED, reason, now=time.time())

    def _give_slots(self) -> None:
        database = self._database
        with database.transaction():
            query = "SELECT id, num_csx, priority FROM jobs WHERE phase = ?"
            waiting = [
                Request(row["id"], row["num_csx"], Priority(row["priority"]))
                for row in database.rows(query, (Phase.QUEUED,))
            ]
            if not waiting:
                return
            leases = database.rows("SELECT job, slot FROM leases")
            held = [
                row["count"] for row in database.rows("SELECT count(*) AS count FROM leases GROUP BY job")
            ]
            free = {slot.number for slot in database.slots()} - {row["slot"] for row in leases}
            for request in schedule(waiting, held, len(free)):
                slots = choose_slots(free, request.num_csx)
                free -= set(slots)
                for slot in slots:
                    database.execute("INSERT INTO leases VALUES (?, ?)", (slot, request.number))
                database.execute(
                    "UPDATE jobs SET phase = ?, slots = ? WHERE id = ?",
                    (Phase.INITIALIZING, json.dumps(slots), request.number),
                )
                logger.info("%s on %s", job_name(request.number), ", ".join(map(slot_name, slots)))

    def _start_watchers(self) -> None:
        """Start a watcher process for each job that has CSXs and no watcher."""
        folder = self._database.folder
        for number in self._numbers(Phase.INITIALIZING):
            if number in self._watchers:
                continue
            # Without a limit, a watcher that dies before it claims the job would be started for ever.
            tries = self._tries[number] = self._tries.get(number, 0) + 1
            if tries > _TRIES:
                reason = "its watcher process does not start; see the supervisor's log"
                with self._database.transaction():
                    if number in self._numbers(Phase.INITIALIZING):
                        self._database.finish(number, Phase.FAILED, reason, now=time.time())
                continue
            with os.fdopen(folder.open_supervisor_log(), "ab") as log:
                self._watchers[number] = subprocess.Popen(
                    [sys.executable, "-P", "-m", "headwater.appliance.watcher", folder.path, str(number)],
                    cwd="/",
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )


def ensure_supervisor(folder: QueueFolder) -> None:
    """Start a supervisor in the background, unless one is running.

    Raises:
        QueueError: if it does not start, or the folder was removed.
    """
    if not folder.exists:
        raise folder.removed()
    if is_locked(folder.supervisor_lock):
        return
    # Two clients must not start two supervisors.
    with locked(folder.start_lock):
        if is_locked(folder.supervisor_lock):
            return
        pid = _start_in_background(folder)
        end = time.monotonic() + _START_TIMEOUT_S
        while not is_locked(folder.supervisor_lock):
            ended, _ = os.waitpid(pid, os.WNOHANG)
            if ended or time.monotonic() > end:
                raise QueueError(
                    "the supervisor of the queue does not start; until then all jobs wait",
                    where=str(folder.supervisor_log),
                    remedy="see this log for the reason, or run `headwater jobs serve`",
                )
            time.sleep(_TICK_S / 10)


def _start_in_background(folder: QueueFolder) -> int:
    """Start a supervisor and return its process number.

    It does not inherit the variables HEADWATER_*: the caller may be a job, and these describe only that job.
    """
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HEADWATER_")}
    log = folder.open_supervisor_log()
    try:
        return os.posix_spawn(
            sys.executable,
            [sys.executable, "-P", "-m", "headwater.appliance.supervisor", str(folder.path)],
            environment,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, log, 1),
                (os.POSIX_SPAWN_DUP2, log, 2),
            ],
            setsid=True,
        )
    finally:
        os.close(log)


def main(path: str) -> int:
    """Run a supervisor in the background and return its exit code."""
    os.chdir("/")
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO)
    folder = QueueFolder(Path(path))
    try:
        supervise(folder, idle_s=None if folder.shared else _IDLE_S)
    except QueueError as error:
        logger.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
