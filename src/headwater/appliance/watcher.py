"""The watcher process of a job: it starts the job, ends it on request, and records its exit code.

Each running job has one. It does not depend on the supervisor, and runs as the owner of the queue, so that
the job cannot stop it. While it lives, it holds the job's byte of the file `jobs.lock`. It claims the job in
the database before it starts the job's process, so a job is never started twice.

    python -m headwater.appliance.watcher FOLDER NUMBER
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
from headwater.appliance.folder import ENVIRONMENT, QueueFolder
from headwater.appliance.machine import Slot, job_cores, job_environment
from headwater.appliance.types import Phase, ending
from headwater.core.errors import QueueError
from headwater.core.placement import JOB
from headwater.core.users import user_name

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_WATCH_S, _END_S, _RETRY_S = 0.5, 0.05, 5.0
NOT_STARTED = 127
"""Exit code of a job whose command could not be run; the same as in a shell."""


def main(folder: str, number: str) -> int:
    """Run the job with this number, and return when it has ended.

    Args:
        folder: the queue's folder.
        number: the job's number.

    Returns:
        The exit code of this process (not that of the job).
    """
    # At shutdown these signals also reach the job. The watcher must survive them to record the job's end.
    for ignored in _IGNORED:
        signal.signal(ignored, signal.SIG_IGN)
    database = Database(QueueFolder(Path(folder)))
    lock = os.open(database.folder.job_locks, os.O_RDWR | os.O_CREAT, 0o600)
    # The lock comes before the claim, because the supervisor marks a running job without a lock as failed.
    if not try_lock(lock, int(number)) or (row := claim(database, int(number))) is None:
        return 0  # the job has another watcher, or was cancelled
    # Orphaned processes of the job become children of this process, so that it can end all of them.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    phase, reason, exit_code = Watch(database, row).run()
    while True:
        try:
            with database.transaction():
                database.finish(int(number), phase, reason, exit_code, now=time.time())
        except QueueError:  # for example a full disk; the job keeps its CSXs until its end is recorded
            time.sleep(_RETRY_S)
        else:
            return 0


def try_lock(lock: int, number: int) -> bool:
    """Try to take the lock of a job, which this process then holds until it ends; true if it was free.

    Args:
        lock: file descriptor of the file of job locks.
        number: the job's number.
    """
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, number)
    except OSError:
        return False
    return True


def claim(database: Database, number: int) -> sqlite3.Row | None:
    """Mark a job as running and return its row; `None` if it is not in the phase INITIALIZING."""
    with database.transaction():
        claimed = database.execute(
            "UPDATE jobs SET phase = ?, started = ? WHERE id = ? AND phase = ?",
            (Phase.RUNNING, time.time(), number, Phase.INITIALIZING),
        )
        return database.rows("SELECT * FROM jobs WHERE id = ?", (number,))[0] if claimed else None


class Watch:
    """Runs one job: starts its process, ends it on request, and waits for its end.

    Args:
        database: the queue's database.
        row: the row of the claimed job.
    """

    def __init__(self, database: Database, row: sqlite3.Row) -> None:
        self._database = database
        self._row = row
        self._grace_s = database.grace_s()
        self._cancels = 0
        self._asked: set[int] = set()  # processes that were asked to end
        self._deadline: float | None = None

    def run(self) -> tuple[Phase, str | None, int | None]:
        """Start the job and wait until all its processes have ended.

        Returns:
            The final phase, the reason, and the exit code.
        """
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})  # sigtimedwait receives it below
        child, complaint = _start(self._database, self._row)
        code = None
        while (found := _reap()) is not None:
            ended, status = found
            if ended == child:
                code = status
            if ended == 0:
                self._read_cancels()
                if self._cancels or code is not None:  # after its exit, the job may have left processes
                    self._end_processes()
                signal.sigtimedwait({signal.SIGCHLD}, _END_S if self._deadline else _WATCH_S)
        assert code is not None, "the process was a child of this one"
        if complaint:
            return Phase.FAILED, complaint, code
        # A process that was asked to end may return any exit code, so the exit code does not decide.
        if child in self._asked:
            return Phase.CANCELLED, f"cancelled; {ending(code)}", code
        return (Phase.SUCCEEDED, None, code) if code == 0 else (Phase.FAILED, ending(code), code)

    def _read_cancels(self) -> None:
        try:
            rows = self._database.rows("SELECT cancels FROM jobs WHERE id = ?", (self._row["id"],))
        except QueueError:  # an unreadable database must not end the job
            return
        self._cancels = rows[0]["cancels"]

    def _end_processes(self) -> None:
        """Send SIGTERM to each direct child, which may forward it to its own children.

        After a second cancellation, or after the grace period, send SIGKILL to all descendants.
        """
        self._deadline = self._deadline or time.monotonic() + self._grace_s
        late = self._cancels > 1 or time.monotonic() > self._deadline
        for process in psutil.Process().children(recursive=late):
            if late:
                _send(process, signal.SIGKILL)
            elif process.pid not in self._asked:
                _send(process, signal.SIGTERM)
            self._asked.add(process.pid)


def _reap() -> tuple[int, int] | None:
    """Reap a child process that has ended. Return its number and exit code.

    Return number 0 if all children are running. Return `None` if this process has no children.
    """
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
    """Start the job's process; return its number, and the reason if its command could not be run."""
    slots = [slot for slot in database.slots() if slot.number in json.loads(row["slots"])]
    job = database.job(row)
    if row["model_dir"] is None:
        job.log.parent.mkdir(mode=0o700, exist_ok=True)
        # Root makes the folder; the job's user writes the log.
        if row["uid"] != os.geteuid():
            os.chown(job.log.parent, row["uid"], row["gid"])
    # The child writes an error to the pipe. A successful exec closes the pipe, because it is not inherited.
    complaint, child_end = os.pipe()
    watcher = os.getpid()
    child = os.fork()
    if child == 0:
        try:
            _become(row, database.folder.path, job.log, slots, watcher)
        except BaseException as error:  # noqa: BLE001 (every error is reported to the parent)
            # One line, because lists of jobs have a row for each job. `fsencode`, because words and paths may
            # not be UTF-8.
            os.write(child_end, os.fsencode("; ".join(map(str.strip, str(error).splitlines()))))
        finally:
            os._exit(NOT_STARTED)
    # This process closes its copy of the writing end. Otherwise the read below would never end.
    os.close(child_end)
    with os.fdopen(complaint, "rb") as pipe:
        text = pipe.read().decode(errors="replace")
    return child, f"its command could not be started: {text}" if text else None


def _become(row: sqlite3.Row, folder: Path, log: Path, slots: Sequence[Slot], watcher: int) -> NoReturn:
    """Replace this process by the job's command, after setting up its session, cores, user, folder and log.

    Args:
        row: the job's row.
        folder: the queue's folder.
        log: file for the job's output.
        slots: the job's CSXs.
        watcher: process number of the watcher.
    """
    os.setsid()
    for ignored in _IGNORED:
        signal.signal(ignored, signal.SIG_DFL)
    # The child has inherited the blocked SIGCHLD of `Watch.run`.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.sched_setaffinity(0, job_cores(slots))
    os.umask(row["umask"])
    if row["uid"] != os.geteuid():
        _become_user(row["uid"], row["gid"])
    # This process must die with the watcher, which may have died before `prctl`. So its parent is checked.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    assert os.getppid() == watcher, "the watcher process is gone"
    os.chdir(row["folder"])
    log.parent.mkdir(parents=True, exist_ok=True)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    name = job_name(row["id"])
    given = ", ".join(slot.name for slot in slots)
    os.write(output, f"job {name} on {given}\n".encode())
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    variables = {JOB: name, ENVIRONMENT: str(folder), **job_environment(slots)}
    command = json.loads(row["command"])
    try:
        os.execvpe(command[0], command, {**json.loads(row["environment"]), **variables})
    except OSError as error:
        raise QueueError(
            f"{command[0]}: {error.strerror}",
            remedy="submit a program that exists on this host and can be executed",
        ) from error


def _become_user(uid: int, gid: int) -> None:
    name = user_name(uid)
    if name == str(uid):
        os.setgroups([gid])
    else:
        os.initgroups(name, gid)
    # The groups are set before the user. Afterwards this process may not change its groups.
    os.setgid(gid)
    os.setuid(uid)


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
