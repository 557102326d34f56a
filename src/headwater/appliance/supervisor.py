"""The supervisor: gives the CSXs of this machine to the jobs that wait. One at a time has a queue.

It keeps nothing in memory that is not in the database: killed at any instant, the next one goes on.
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
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import psutil

from headwater.appliance.database import Database, job_name
from headwater.appliance.embedded import JOB
from headwater.appliance.folder import ENVIRONMENT, QueueFolder, held, is_held
from headwater.appliance.machine import slot_name
from headwater.appliance.schedule import Request, choose_slots, schedule
from headwater.appliance.server import serving
from headwater.appliance.types import Phase, Priority
from headwater.appliance.wrapper import try_lock
from headwater.core.errors import QueueError
from headwater.core.signals import handled

logger = logging.getLogger(__name__)

_TICK_S, _LOOK_S = 0.1, 1.0
_START_TIMEOUT_S, _KILL_TIMEOUT_S = 30.0, 10.0
_TRIES = 3
_IDLE_S = 60.0
"""After so long without a job a supervisor ends that nobody started by hand."""


def supervise(folder: QueueFolder, idle_s: float | None = None) -> None:
    """Give out CSXs until SIGTERM or Ctrl-C; jobs that run then go on.

    Args:
        folder: of the queue.
        idle_s: end after so many seconds without a job; never where absent.

    Raises:
        QueueError: if another supervisor has this queue.
    """
    while True:
        lock = _take(folder)
        database = Database(folder)
        try:
            with serving(folder), _stopping() as stop:
                Supervisor(database).run(stop, idle_s)
        finally:
            os.close(lock)
        # A job that was submitted before the lock was free has found a supervisor, so it is looked for after.
        if (
            stop.asked
            or not database.rows("SELECT 1 FROM jobs WHERE ended IS NULL")
            or is_held(folder.supervisor_lock)
        ):
            database.close()
            return
        database.close()


class _Stop:
    """Whether a signal has asked the supervisor to end."""

    def __init__(self) -> None:
        self.asked = False

    def handle(self, number: int, frame: FrameType | None) -> None:
        """A signal handler."""
        self.asked = True


@contextmanager
def _stopping() -> Iterator[_Stop]:
    stop = _Stop()
    with handled(dict.fromkeys((signal.SIGINT, signal.SIGTERM), stop.handle)):
        yield stop


def _take(folder: QueueFolder) -> int:
    """The lock of the one supervisor."""
    lock = os.open(folder.supervisor_lock, os.O_RDWR | os.O_CREAT, 0o600)
    end = time.monotonic() + 1  # those who only look hold it for an instant
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            if time.monotonic() > end:
                os.close(lock)
                raise QueueError(
                    "another supervisor gives out the CSXs of this queue", where=str(folder.path)
                ) from None
            time.sleep(_TICK_S / 10)


class Supervisor:
    """Gives out CSXs.

    Args:
        database: of the queue.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._wrappers: dict[int, subprocess.Popen[bytes]] = {}
        self._tries: dict[int, int] = {}
        self._locks = os.open(database.folder.job_locks, os.O_RDWR | os.O_CREAT, 0o600)

    def run(self, stop: _Stop, idle_s: float | None) -> None:
        """Look after jobs until somebody asks to stop, or there were none for `idle_s`."""
        changes, looked, busy = None, 0.0, time.monotonic()
        while not stop.asked:
            now = time.monotonic()
            ended = [wrapper for wrapper in self._wrappers.values() if wrapper.poll() is not None]
            if ended or changes != self._database.changes or now - looked > _LOOK_S:
                changes, looked = self._database.changes, now
                try:
                    if self.look():
                        busy = now
                except QueueError as error:  # a full disk, say: it may be over the next time
                    logger.error("%s", error)
            if idle_s is not None and now - busy > idle_s:
                return
            time.sleep(_TICK_S)

    def look(self) -> bool:
        """See what has happened, and start what can start; whether there is a job that is not over."""
        self._wrappers = {number: one for number, one in self._wrappers.items() if one.poll() is None}
        self._find_lost()
        self._admit()
        self._give_slots()
        self._start_wrappers()
        return bool(self._numbers(*(phase for phase in Phase if not phase.over)))

    def _numbers(self, *phases: Phase) -> list[int]:
        marks = ", ".join("?" * len(phases))
        return [
            row["id"] for row in self._database.rows(f"SELECT id FROM jobs WHERE phase IN ({marks})", phases)
        ]

    def _find_lost(self) -> None:
        """Jobs that nobody watches over any more have failed: how they ended cannot be known."""
        for number in self._numbers(Phase.RUNNING):
            if not try_lock(self._locks, number):
                continue
            fcntl.lockf(self._locks, fcntl.LOCK_UN, 1, number)
            if number not in self._numbers(Phase.RUNNING):
                continue  # it was over just before
            _kill_processes(self._database.folder, job_name(number))
            reason = "the process that watched over it was ended, or the machine was"
            with self._database.transaction():
                self._database.finish(number, Phase.FAILED, reason, now=time.time())

    def _admit(self) -> None:
        """See whether jobs can ever run; there may be fewer CSXs than when they were submitted."""
        num_csx = len(self._database.slots())
        with self._database.transaction():
            self._database.execute("UPDATE jobs SET phase = ? WHERE phase = ?", (Phase.QUEUED, Phase.CREATED))
            query = "SELECT id, num_csx FROM jobs WHERE phase = ? AND num_csx > ?"
            for row in self._database.rows(query, (Phase.QUEUED, num_csx)):
                reason = f"it needs {row['num_csx']} CSXs, and there are {num_csx}"
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

    def _start_wrappers(self) -> None:
        """Start what watches over the jobs that have CSXs, also those of a supervisor that was killed."""
        folder = self._database.folder
        for number in self._numbers(Phase.INITIALIZING):
            if number in self._wrappers:
                continue
            tries = self._tries[number] = self._tries.get(number, 0) + 1
            if tries > _TRIES:
                reason = "the process that would watch over it does not start; the supervisor's log says why"
                with self._database.transaction():
                    if number in self._numbers(Phase.INITIALIZING):
                        self._database.finish(number, Phase.FAILED, reason, now=time.time())
                continue
            with os.fdopen(folder.open_supervisor_log(), "ab") as log:
                self._wrappers[number] = subprocess.Popen(
                    [sys.executable, "-P", "-m", "headwater.appliance.wrapper", folder.path, str(number)],
                    cwd="/",
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )


def _kill_processes(folder: QueueFolder, job: str) -> None:
    """End what is left of a job that nobody watches over; its processes are known by their environment."""
    ended = []
    for process in psutil.process_iter():
        try:
            environment = process.environ()
            if environment.get(JOB) == job and environment.get(ENVIRONMENT) == str(folder.path):
                process.kill()
                ended.append(process)
        except psutil.Error:
            continue  # it is gone, or another user's
    psutil.wait_procs(ended, timeout=_KILL_TIMEOUT_S)


def ensure_supervisor(folder: QueueFolder) -> None:
    """See that a supervisor runs; starts one in the background if there is none.

    Raises:
        QueueError: if it does not start.
    """
    if is_held(folder.supervisor_lock):
        return
    with held(folder.start_lock):
        if is_held(folder.supervisor_lock):
            return
        pid = _start_in_background(folder)
        end = time.monotonic() + _START_TIMEOUT_S
        while not is_held(folder.supervisor_lock):
            ended, _ = os.waitpid(pid, os.WNOHANG)
            if ended or time.monotonic() > end:
                raise QueueError(
                    "the supervisor of the queue does not start; jobs wait until one does",
                    where=str(folder.supervisor_log),
                    remedy="see why there, or with `headwater jobs serve`",
                )
            time.sleep(_TICK_S / 10)


def _start_in_background(folder: QueueFolder) -> int:
    """Its process number. It has nothing of the job that may have asked for it."""
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
    """A supervisor in the background; returns its exit code."""
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
