"""The embedded queue: a queue in an SQLite database, for processes that may write the database."""

from __future__ import annotations

import dataclasses
import json
import os
import sqlite3
import time
from collections.abc import Callable, Mapping

from headwater.appliance.database import Database, job_name, job_numbers, unknown_job
from headwater.appliance.queue import Queue, read_local_log
from headwater.appliance.types import Job, Phase, Priority, Submission
from headwater.core.errors import QueueError
from headwater.core.placement import JOB, check_csx_limit
from headwater.core.users import user_name

_SET_FOR_JOB = (JOB, "HEADWATER_CSX")
"""Environment variables that the queue sets for a job. Jobs that it submits must not inherit them."""


@dataclasses.dataclass(frozen=True)
class Caller:
    """The user that sends a request, as reported by the kernel."""

    uid: int
    gid: int

    @classmethod
    def myself(cls) -> Caller:
        """Return the effective user of this process."""
        return cls(os.geteuid(), os.getegid())


class EmbeddedQueue(Queue):
    """A queue stored in a database.

    Args:
        database: the queue's database.
        caller: the user on whose behalf requests are made.
        wake: ensures that a supervisor runs; called when a returned job is not over.
    """

    def __init__(self, database: Database, caller: Caller, wake: Callable[[], None]) -> None:
        self._database = database
        self._caller = caller
        self._wake = wake

    def submit(self, submission: Submission, token: str) -> Job:
        check_csx_limit(submission.num_csx, self.num_csx(), "CSXs of the queue", where="num_csx")
        database, caller = self._database, self._caller
        environment = {
            name: value for name, value in submission.environment.items() if name not in _SET_FOR_JOB
        }
        values = {
            "token": token,
            "uid": caller.uid,
            "gid": caller.gid,
            "user": user_name(caller.uid),
            "command": json.dumps(submission.command),
            "folder": str(submission.folder),
            "environment": json.dumps(environment),
            "umask": submission.umask,
            "num_csx": submission.num_csx,
            "model_dir": submission.model_dir and str(submission.model_dir),
            "priority": submission.priority,
            "labels": json.dumps(dict(submission.labels)),
            "phase": Phase.CREATED,
            "created": time.time(),
        }
        with database.transaction():
            known = database.rows("SELECT id FROM jobs WHERE token = ?", (token,))
            if not known:
                self._refuse_taken(submission)
                names, marks = ", ".join(values), ", ".join("?" * len(values))
                database.execute(f"INSERT INTO jobs ({names}) VALUES ({marks})", list(values.values()))
                known = database.rows("SELECT id FROM jobs WHERE token = ?", (token,))
        return self.show(job_name(known[0]["id"]))

    def jobs(self, *, everything: bool = False) -> list[Job]:
        which = "" if everything else "WHERE ended IS NULL"
        rows = self._database.rows(f"SELECT * FROM jobs {which} ORDER BY id")
        return self._ensure_served([self._database.job(row) for row in rows])

    def show(self, name: str) -> Job:
        return self._ensure_served([self._database.job(self._row(name))])[0]

    def cancel(self, name: str) -> Job:
        database = self._database
        with database.transaction():
            row = self._live_row(name)
            if row["phase"] == Phase.RUNNING:  # the job's watcher process reads `cancels` and ends the job
                database.execute("UPDATE jobs SET cancels = cancels + 1 WHERE id = ?", (row["id"],))
            else:
                who = f"cancelled by {user_name(self._caller.uid)} before it ran"
                database.finish(row["id"], Phase.CANCELLED, who, now=time.time())
        return self.show(job_name(row["id"]))

    def label(self, name: str, labels: Mapping[str, str | None]) -> Job:
        with self._database.transaction():
            row = self._live_row(name)
            merged = merge_labels(json.loads(row["labels"]), labels, job_name(row["id"]))
            self._database.execute("UPDATE jobs SET labels = ? WHERE id = ?", (json.dumps(merged), row["id"]))
        return self.show(job_name(row["id"]))

    def set_priority(self, name: str, priority: Priority) -> Job:
        with self._database.transaction():
            row = self._live_row(name)
            if row["phase"] not in (Phase.CREATED, Phase.QUEUED):
                raise QueueError(
                    f"the priority of job {job_name(row['id'])} cannot change: it is {row['phase']}",
                    remedy="change priorities only of jobs that are CREATED or QUEUED",
                )
            self._database.execute("UPDATE jobs SET priority = ? WHERE id = ?", (priority, row["id"]))
        return self.show(job_name(row["id"]))

    def num_csx(self) -> int:
        return len(self._database.slots())

    def read_log(self, job: Job, position: int) -> bytes:
        return read_local_log(job, position)

    def _ensure_served(self, jobs: list[Job]) -> list[Job]:
        if not all(job.phase.over for job in jobs):
            # An idle supervisor ends by itself, so one may have to be started.
            self._wake()
        return jobs

    def _row(self, name: str) -> sqlite3.Row:
        numbers = job_numbers(name)
        query = "SELECT * FROM jobs WHERE id BETWEEN ? AND ? ORDER BY id LIMIT 3"
        rows = self._database.rows(query, (numbers[0], numbers[-1]))
        if not rows:
            raise unknown_job(name)
        if len(rows) > 1:
            names = ", ".join(job_name(row["id"]) for row in rows)
            what = f"several jobs have names that start with {name!r}: {names}"
            raise QueueError(what, remedy="write more digits of the name")
        return rows[0]

    def _live_row(self, name: str) -> sqlite3.Row:
        """Return the row of an unfinished job that the caller may change. Call it inside a transaction."""
        row = self._row(name)
        name = job_name(row["id"])
        # The caller's transaction ensures that the row cannot change before it is used.
        if self._caller.uid not in (0, row["uid"]):
            owner = row["user"]
            who = owner if row["uid"] == 0 else f"{owner}, or root"
            raise QueueError(f"job {name} belongs to {owner}", remedy=f"ask {who}")
        if Phase(row["phase"]).over:
            raise job_over(name, row["phase"])
        return row

    def _refuse_taken(self, submission: Submission) -> None:
        query = "SELECT id, phase FROM jobs WHERE model_dir = ? AND ended IS NULL"
        for row in self._database.rows(query, (submission.model_dir and str(submission.model_dir),)):
            raise model_dir_taken(job_name(row["id"]), row["phase"], submission)


def job_over(name: str, phase: str) -> QueueError:
    """Return the error for a change of a job that is over."""
    return QueueError(f"job {name} has ended: {phase}", remedy="change only jobs that wait or run")


def model_dir_taken(name: str, phase: str, submission: Submission) -> QueueError:
    """Return the error for a model_dir that another unfinished job uses.

    Args:
        name: the name of the other job.
        phase: the phase of the other job.
        submission: the job that is refused.
    """
    return QueueError(
        f"job {name} ({phase}) uses this model_dir",
        where=str(submission.model_dir),
        remedy=f"wait for it, cancel it (headwater jobs cancel {name}), or use another model_dir",
    )


def merge_labels(labels: Mapping[str, str], changes: Mapping[str, str | None], name: str) -> dict[str, str]:
    """Apply changes to the labels of a job, and return the new labels.

    Args:
        labels: the current labels.
        changes: new values; `None` removes a label.
        name: the name of the job, for the error.

    Raises:
        QueueError: if a label to remove does not exist.
    """
    for label, value in changes.items():
        if value is None and label not in labels:
            raise QueueError(
                f"job {name} has no label {label!r}", remedy=f"it has: {', '.join(labels) or 'none'}"
            )
    merged = {**labels, **changes}
    return {label: value for label, value in merged.items() if value is not None}
