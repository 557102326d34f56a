"""The SQLite database of an embedded queue: all jobs, the CSXs, and the job that holds each CSX.

A CSX is the primary key of `leases`, and a model_dir is unique among unfinished jobs. So no CSX and no
model_dir can be given to two jobs, even if processes run concurrently or are killed at any point.
"""

from __future__ import annotations

import json
import os
import sqlite3
import uuid
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from headwater.appliance.folder import QueueFolder
from headwater.appliance.machine import Slot, slot_name, slots_from_record, slots_to_record
from headwater.appliance.types import Job, Phase, Priority
from headwater.core.errors import QueueError

_VERSION = 1
_TIMEOUT_S = 60.0
_DIGITS, _MAX_DIGITS = 12, 18
"""Digits of the number in a job's name, and the most digits that always fit into 64 bits."""
_SCHEMA = f"""
CREATE TABLE jobs (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    token TEXT NOT NULL UNIQUE,
    uid INTEGER NOT NULL,
    gid INTEGER NOT NULL,
    user TEXT NOT NULL,
    command TEXT NOT NULL,
    folder TEXT NOT NULL,
    environment TEXT NOT NULL,
    umask INTEGER NOT NULL,
    num_csx INTEGER NOT NULL CHECK (num_csx > 0),
    model_dir TEXT,
    priority TEXT NOT NULL,
    labels TEXT NOT NULL,
    phase TEXT NOT NULL,
    reason TEXT,
    exit_code INTEGER,
    slots TEXT NOT NULL DEFAULT '[]',
    cancels INTEGER NOT NULL DEFAULT 0,
    created REAL NOT NULL,
    started REAL,
    ended REAL
);
CREATE INDEX jobs_by_phase ON jobs (phase);
CREATE UNIQUE INDEX one_job_a_model_dir ON jobs (model_dir) WHERE ended IS NULL;
CREATE TABLE leases (slot INTEGER PRIMARY KEY, job INTEGER NOT NULL REFERENCES jobs (id));
CREATE TABLE settings (name TEXT PRIMARY KEY, value TEXT NOT NULL);
PRAGMA user_version = {_VERSION};
"""


class Database:
    """A connection to the database of a queue. Each thread needs its own.

    Args:
        folder: the queue's folder, which contains the database.

    Raises:
        QueueError: if the database cannot be read, or has another version.
    """

    def __init__(self, folder: QueueFolder) -> None:
        self.folder = folder
        self._must_truncate_log = False
        with _errors(folder.database):
            self._connection = _connect(folder.database)
            (version,) = self._connection.execute("PRAGMA user_version").fetchone()
        # This check comes before any other query: the tables of another version may have other columns.
        if version != _VERSION:
            self.close()
            raise QueueError(
                f"expected queue format {_VERSION}, got format {version} of another version of headwater",
                where=str(folder.database),
                remedy="use that version until its jobs have ended, or name another folder with --queue_dir",
            )

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def execute(self, statement: str, values: Sequence[object] = ()) -> int:
        """Run a statement and return the number of rows that it changed."""
        with _errors(self.folder.database):
            return self._connection.execute(statement, values).rowcount

    def rows(self, query: str, values: Sequence[object] = ()) -> list[sqlite3.Row]:
        """Return the rows of a query."""
        with _errors(self.folder.database):
            return self._connection.execute(query, values).fetchall()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Run the statements of the context atomically, while other processes cannot write."""
        with _errors(self.folder.database):
            with self._connection:  # commits, or rolls back on any error
                # IMMEDIATE takes the write lock now. Otherwise another process could write between a read and
                # a write of this transaction, and the write would fail.
                self._connection.execute("BEGIN IMMEDIATE")
                yield
            if self._must_truncate_log:
                self._must_truncate_log = False
                # Otherwise the erased environment would stay in the write-ahead log until the log is reused.
                self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    @property
    def changes(self) -> int:
        """A counter that differs from its last value if another process has changed the database since."""
        return int(self.rows("PRAGMA data_version")[0][0])

    def slots(self) -> list[Slot]:
        """Return the CSXs of the machine."""
        return slots_from_record(self._setting("slots"))

    def grace_s(self) -> float:
        """Return the seconds from the request to end a job until it is killed."""
        return float(self._setting("grace_s"))

    def change_settings(self, slots: Sequence[Slot] | None, grace_s: float | None) -> None:
        """Change the slots and the grace period; an argument of `None` leaves its setting as it is."""
        given = {"slots": slots and slots_to_record(slots), "grace_s": grace_s}
        for name, value in given.items():
            if value is not None:
                self.execute("UPDATE settings SET value = ? WHERE name = ?", (json.dumps(value), name))

    def _setting(self, name: str) -> Any:
        return json.loads(self.rows("SELECT value FROM settings WHERE name = ?", (name,))[0]["value"])

    def finish(
        self, number: int, phase: Phase, reason: str | None, exit_code: int | None = None, *, now: float
    ) -> None:
        """Record the end of a job, free its CSXs and erase its environment. Call it inside a transaction.

        Args:
            number: the job's number.
            phase: a final phase.
            reason: why the job failed or was cancelled.
            exit_code: the exit code of the job's process, if it was started.
            now: time of the end, in seconds since 1970.
        """
        changes = "phase = ?, reason = ?, exit_code = ?, ended = ?, environment = '{}'"
        # A job that never started has not used its CSXs.
        changes += ", slots = CASE WHEN started IS NULL THEN '[]' ELSE slots END"
        values = (phase, reason, exit_code, now, number)
        self.execute(f"UPDATE jobs SET {changes} WHERE id = ?", values)
        # This is in the same transaction, so that no CSX is free while its job still counts as running.
        self.execute("DELETE FROM leases WHERE job = ?", (number,))
        self._must_truncate_log = True

    def job(self, row: sqlite3.Row) -> Job:
        """Return the job that a row of the table `jobs` describes."""
        name = job_name(row["id"])
        model_dir = None if row["model_dir"] is None else Path(row["model_dir"])
        return Job(
            name=name,
            user=row["user"],
            command=tuple(json.loads(row["command"])),
            folder=Path(row["folder"]),
            num_csx=row["num_csx"],
            model_dir=model_dir,
            priority=Priority(row["priority"]),
            labels=json.loads(row["labels"]),
            phase=Phase(row["phase"]),
            reason=row["reason"],
            exit_code=row["exit_code"],
            systems=tuple(map(slot_name, json.loads(row["slots"]))),
            log=(model_dir or self.folder.job_folder(name)) / f"{name}.log",
            created=row["created"],
            started=row["started"],
            ended=row["ended"],
        )


def create_database(folder: QueueFolder, slots: Sequence[Slot], grace_s: float) -> None:
    """Create the database of a queue, unless another process has created it meanwhile.

    It is written under another name and then linked, so that other processes never see a partial database.

    Args:
        folder: the queue's folder.
        slots: the CSXs of the machine.
        grace_s: seconds from the request to end a job until it is killed.
    """
    partial = folder.database.with_name(f"{uuid.uuid4().hex}.partial")
    with _errors(folder.database):
        os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        try:
            with closing(_connect(partial)) as connection:
                # With a write-ahead log (WAL), readers such as `jobs list` do not wait for writers.
                connection.execute("PRAGMA journal_mode = WAL")
                connection.executescript(_SCHEMA)
                for name, value in (("slots", slots_to_record(slots)), ("grace_s", grace_s)):
                    connection.execute("INSERT INTO settings VALUES (?, ?)", (name, json.dumps(value)))
            with suppress(FileExistsError):
                # A rename would replace a database that another process has just made. A link does not.
                folder.database.hardlink_to(partial)
        finally:
            partial.unlink()


def job_name(number: int) -> str:
    """Return the name of the job with this number."""
    return f"wsjob-{number:0{_DIGITS}d}"


def job_numbers(name: str) -> range:
    """Return the numbers of all jobs that `name` may mean. It may leave out the last digits.

    A name without leading zeros means one job: `wsjob-7` or `7`. A prefix of a full name, such as
    `wsjob-00000000004`, means every job whose name starts with it.

    Raises:
        QueueError: if `name` is not a valid name.
    """
    digits = name.removeprefix("wsjob-")
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= _MAX_DIGITS):
        raise unknown_job(name)
    # Only a full name has leading zeros, so this text is the beginning of a full name.
    if digits[0] == "0" and len(digits) < _DIGITS:
        return range(int(digits.ljust(_DIGITS, "0")), int(digits.ljust(_DIGITS, "9")) + 1)
    return range(int(digits), int(digits) + 1)


def unknown_job(name: str) -> QueueError:
    """Return the error for a job that does not exist."""
    return QueueError(f"there is no job {name!r}", remedy="see `headwater jobs list --all`")


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=_TIMEOUT_S, isolation_level=None)
    connection.row_factory = sqlite3.Row
    connection.execute("PRAGMA secure_delete = ON")  # overwrites deleted content with zeros
    return connection


@contextmanager
def _errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, OSError, OverflowError, UnicodeError) as error:
        raise QueueError(
            f"the database of the queue cannot be used: {error}",
            where=str(path),
            remedy="check the rights of the file and the free space of its disk, or name another folder",
        ) from error
