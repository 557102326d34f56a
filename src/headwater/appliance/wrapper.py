"""The process that watches over one job: starts it, once, ends it when asked to, and records how it ended.

There is one for each job that runs. It lives on whatever happens to the supervisor, and belongs to the owner
of the queue, so that the job cannot stop it. While it lives it holds the job's byte of the file of job locks;
the job is claimed in the database before its process is started, and so never starts a second time.

    python -m headwater.appliance.wrapper FOLDER NUMBER
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import signal
import sqlite3
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import psutil

from headwater.appliance.database import Database, job_name
from headwater.appliance.embedded import JOB
from headwater.appliance.folder import ENVIRONMENT, QueueFolder, user_name
from headwater.appliance.machine import Slot, job_cores, job_environment
from headwater.appliance.types import Phase, ending
from headwater.core.errors import QueueError

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_WATCH_S, _END_S, _RETRY_S = 0.5, 0.05, 5.0
NOT_STARTED = 127
"""Exit code of a job whose command could not be run, as a shell has it."""


def main(folder: str, number: str) -> int:
    """Watch over a job until it is over; returns the exit code of this process, which is not the job's."""
    for ignored in _IGNORED:  # what ends the machine ends the job, and that is to be recorded
        signal.signal(ignored, signal.SIG_IGN)
    database = Database(QueueFolder(Path(folder)))
    lock = os.open(database.folder.job_locks, os.O_RDWR | os.O_CREAT, 0o600)
    if not try_lock(lock, int(number)) or (row := claim(database, int(number))) is None:
        return 0  # somebody else watches over it, or it was cancelled
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)  # no process of the job escapes
    phase, reason, exit_code = Watch(database, row).run()
    while True:
        try:
            with database.transaction():
                database.finish(int(number), phase, reason, exit_code, now=time.time())
        except QueueError:  # a full disk, say: the job keeps its CSXs until it can be recorded
            time.sleep(_RETRY_S)
        else:
            return 0


def try_lock(lock: int, number: int) -> bool:
    """Take the lock of a job, which ends with this process; whether nobody else had it."""
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, number)
    except OSError:
        return False
    return True


def claim(database: Database, number: int) -> sqlite3.Row | None:
    """Take a job, once; what is known of it, or `None` if it is not there to be taken."""
    with database.transaction():
        claimed = database.execute(
            "UPDATE jobs SET phase = ?, started = ? WHERE id = ? AND phase = ?",
            (Phase.RUNNING, time.time(), number, Phase.INITIALIZING),
        )
        return database.rows("SELECT * FROM jobs WHERE id = ?", (number,))[0] if claimed else None


class Watch:
    """A job from its start to its end.

    Args:
        database: of the queue.
        row: of the job, which is claimed.
    """

    def __init__(self, database: Database, row: sqlite3.Row) -> None:
        self._database = database
        self._row = row
        self._grace_s = database.grace_s()
        self._cancels = 0
        self._asked: set[int] = set()  # processes that were asked to end
        self._deadline: float | None = None

    def run(self) -> tuple[Phase, str | None, int | None]:
        """Start the process and wait until none of the job's processes is left; how it ended."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})  # it is waited for below
        child, complaint = _start(self._database, self._row)
        code = None
        while (found := _reap()) is not None:
            ended, status = found
            if ended == child:
                code = status
            if ended == 0:
                self._read_cancels()
                if self._cancels or code is not None:  # also what the job has left running
                    self._end_processes()
                signal.sigtimedwait({signal.SIGCHLD}, _END_S if self._deadline else _WATCH_S)
        assert code is not None, "the process was a child of this one"
        if complaint:
            return Phase.FAILED, complaint, code
        if child in self._asked:
            return Phase.CANCELLED, f"cancelled; {ending(code)}", code
        return (Phase.SUCCEEDED, None, code) if code == 0 else (Phase.FAILED, ending(code), code)

    def _read_cancels(self) -> None:
        try:
            rows = self._database.rows("SELECT cancels FROM jobs WHERE id = ?", (self._row["id"],))
        except QueueError:  # a full disk, say, is no reason to end a job
            return
        self._cancels = rows[0]["cancels"]

    def _end_processes(self) -> None:
        """Ask each process that is nobody else's child to end; it tells its own as it sees fit."""
        self._deadline = self._deadline or time.monotonic() + self._grace_s
        late = self._cancels > 1 or time.monotonic() > self._deadline
        for process in psutil.Process().children(recursive=late):
            if late:
                _send(process, signal.SIGKILL)
            elif process.pid not in self._asked:
                _send(process, signal.SIGTERM)
            self._asked.add(process.pid)


def _reap() -> tuple[int, int] | None:
    """A process that has ended, with its exit code; 0 if none has, and `None` if none is left."""
    try:
        ended, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return ended, os.waitstatus_to_exitcode(status)


def _send(process: psutil.Process, number: int) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return


def _start(database: Database, row: sqlite3.Row) -> tuple[int, str | None]:
    """Start the job's process; its number, and why its command could not be run."""
    slots = [slot for slot in database.slots() if slot.number in json.loads(row["slots"])]
    job = database.job(row)
    if row["model_dir"] is None:
        job.log.parent.mkdir(mode=0o700, exist_ok=True)
        if row["uid"] != os.geteuid():
            os.chown(job.log.parent, row["uid"], row["gid"])
    complaint, child_end = os.pipe()  # closed when the command runs
    watcher = os.getpid()
    child = os.fork()
    if child == 0:
        try:
            _become(row, database.folder.path, job.log, slots, watcher)
        except BaseException as error:  # noqa: BLE001 (it is told to the other side, whatever it is)
            os.write(child_end, str(error).encode())
        finally:
            os._exit(NOT_STARTED)
    os.close(child_end)
    with os.fdopen(complaint, "rb") as pipe:
        text = pipe.read().decode(errors="replace")
    return child, f"it could not be started: {text}" if text else None


def _become(row: sqlite3.Row, folder: Path, log: Path, slots: Sequence[Slot], watcher: int) -> NoReturn:
    """Turn this process into the job's: its own session, cores, user, folder, log and environment."""
    os.setsid()
    for ignored in _IGNORED:
        signal.signal(ignored, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.sched_setaffinity(0, job_cores(slots))
    os.umask(row["umask"])
    if row["uid"] != os.geteuid():
        _become_user(row["uid"], row["gid"])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # unwatched it would be nobody's
    assert os.getppid() == watcher, "the process that watches over it is gone"
    os.chdir(row["folder"])
    log.parent.mkdir(parents=True, exist_ok=True)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    name = job_name(row["id"])
    given = ", ".join(slot.name for slot in slots)
    os.write(output, f"job {name} on {given}\n".encode())
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    told = {JOB: name, ENVIRONMENT: str(folder), **job_environment(slots)}
    command = json.loads(row["command"])
    try:
        os.execvpe(command[0], command, {**json.loads(row["environment"]), **told})
    except OSError as error:
        raise QueueError(f"{command[0]}: {error.strerror}") from error


def _become_user(uid: int, gid: int) -> None:
    name = user_name(uid)
    if name == str(uid):
        os.setgroups([gid])
    else:
        os.initgroups(name, gid)
    os.setgid(gid)
    os.setuid(uid)


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
