"""The runs of a folder. A thread follows new runs, new steps and runs that are deleted."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, final

from headwater.board import content, files
from headwater.board.content import Document, RunState
from headwater.board.digest import Bands
from headwater.board.reading import HistoryReader
from headwater.core.errors import DataError
from headwater.core.files import kind_of
from headwater.trainer.facts import RunFacts, read_facts
from headwater.trainer.run_dir import FACTS_FILE, RunDir

_POLL_S = 0.5
_SHARE_OF_SCANS = 20
"""A scan of the folder comes at the earliest after this many times the duration of the one before."""
_SAMPLED_LINES = 400
_READ_AT_ONCE = 1 << 18
_PAUSE_S = 0.001
"""Seconds between two reads, in which the thread releases the interpreter to requests."""
_READY_S = 60.0


@final
class FollowedRun:
    """One run of the folder: its files, and the history as far as it was read.

    Args:
        folder: the folder of the board.
        name: relative path of the run.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self.dir = RunDir(folder / name)
        self.history = HistoryReader(self.dir.history)
        self.version = 0
        self._problem: str | None = None
        self._changed = 0.0
        self._facts: RunFacts | None = None

    def look(self) -> None:
        """Read the facts of the run, and the size and the time of change of its history."""
        with self._problem_of_files():
            self._look()

    def sample(self) -> None:
        """Read lines that are spread over the history."""
        with self._problem_of_files():
            self.history.sample(_SAMPLED_LINES)

    def advance(self) -> bool:
        """Read new lines; return true if anything has changed."""
        before = self._problem, self._facts
        changed = False
        with self._problem_of_files():
            self._look()
            changed = self.history.advance(_READ_AT_ONCE)
        return changed or (self._problem, self._facts) != before

    def state(self) -> RunState:
        """Return the state of the run."""
        with self.history.lock:
            return RunState(
                name=self.name,
                steps=tuple(self.history.steps),
                facts=self._facts,
                changed=self._changed,
                read_share=self.history.read_share,
                damaged=self.history.damaged,
                problem=self._problem,
                version=self.version,
            )

    def bands(self, count: int) -> tuple[Bands, tuple[Mapping[str, Any], ...]]:
        """Return the values of all steps in at most `count` buckets, and the records of evaluations."""
        with self.history.lock:
            return self.history.digest.bands(count), tuple(self.history.validations)

    def _look(self) -> None:
        self._facts = read_facts(self.dir.path / FACTS_FILE)
        found = self.dir.history.stat()
        self._changed, self.history.size = found.st_mtime, found.st_size

    @contextmanager
    def _problem_of_files(self) -> Iterator[None]:
        """If a file cannot be read inside the context, keep the problem for the list of runs."""
        try:
            yield
        except OSError as error:
            self._problem = f"history.jsonl cannot be read: {error.strerror}"
        else:
            self._problem = None


@final
class Board:
    """The runs below a folder. Inside its context, a thread reads what they append to their histories.

    Args:
        folder: the folder.

    Raises:
        DataError: if the folder does not exist.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise DataError(
                f"expected a folder of runs, found {kind_of(folder) or 'no folder'}",
                where=str(folder),
                remedy="name a model_dir, or a folder with model_dirs in it",
            )
        self._folder = folder
        self._runs: dict[str, FollowedRun] = {}
        self._version = 0
        self._lock = threading.Lock()
        self._scanned, self._scan_s = 0.0, 0.0
        self._ready, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._follow, name="headwater-board", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def version(self) -> int:
        """A number that grows with each change of a run or of the list of runs."""
        return self._version

    def document(self) -> Document:
        """Return the folder and the rows of all runs. Blocks until the folder was searched once."""
        self._ready.wait(_READY_S)
        with self._lock:
            runs = tuple(self._runs.values())
        now = time.time()
        rows = [content.run_row(run.state(), now) for run in runs]
        return {"folder": str(self._folder), "exists": self._folder.is_dir(), "now": now, "runs": rows}

    def curves(self, names: Iterable[str], points: int) -> Document:
        """Return the curves of runs, each with at most `points` buckets; unknown runs are left out."""
        found = {}
        for name in names:
            with self._lock:
                run = self._runs.get(name)
            if run is not None:
                version = run.version  # before the data: if they are newer, the page asks again
                found[name] = {"version": version, **content.curves(*run.bands(points))}
        return found

    def details(self, name: str) -> Document:
        """Return plan, logs, samples and evaluations of a run.

        Raises:
            DataError: if there is no such run.
        """
        run = self.run(name)
        with run.history.lock:
            validations = tuple(run.history.validations)
        return {
            "name": name,
            "plan": files.plan_text(run.dir),
            "logs": files.logs(run.dir),
            "has_timeline": files.timeline(run.dir) is not None,
            "samples": files.samples(run.dir),
            "validations": content.validation_rows(validations),
        }

    def log(self, name: str, log: str) -> str:
        """Return the end of a log of a run.

        Raises:
            DataError: if there is no such run or log, or if the log cannot be read.
        """
        run = self.run(name)
        try:
            if log in files.logs(run.dir):
                return files.end_of_log(run.dir.path / log)
        except OSError as error:
            raise DataError(f"the log cannot be read: {error.strerror}", where=f"{name}/{log}") from error
        raise DataError("there is no such log", where=f"{name}/{log}")

    def timeline(self, name: str) -> Path:
        """Return the picture of the last profiled step of a run.

        Raises:
            DataError: if there is no such run or picture.
        """
        found = files.timeline(self.run(name).dir)
        if found is None:
            raise DataError("no step of the run was profiled with a picture", where=name)
        return found

    def run(self, name: str) -> FollowedRun:
        """Return a run by its name.

        Raises:
            DataError: if there is no such run.
        """
        with self._lock:
            run = self._runs.get(name)
        if run is None:
            raise DataError("there is no such run in the folder", where=name)
        return run

    def refresh(self) -> bool:
        """Look for changes once. Return true if some histories have more to read."""
        if time.monotonic() - self._scanned >= _SHARE_OF_SCANS * self._scan_s:
            self._scan()
        more = False
        for run in tuple(self._runs.values()):
            if run.advance():
                self._note_change(run)
                # Without a change there is no more to read: the run may have written a part of a line.
                more = more or run.history.read_share < 1
            if self._over.wait(_PAUSE_S):
                break
        return more

    def _scan(self) -> None:
        """Find the runs that are new, and drop those that have vanished."""
        begin = time.monotonic()
        names = list(files.find_runs(self._folder))
        new = [FollowedRun(self._folder, name) for name in names if name not in self._runs]
        for run in new:
            run.look()
        with self._lock:
            known = {**self._runs, **{run.name: run for run in new}}
            if known.keys() != self._runs.keys() or len(names) != len(self._runs):
                self._version += 1
            for run in new:
                run.version = self._version
            self._runs = {name: known[name] for name in names}
        self._scanned = time.monotonic()
        self._scan_s = self._scanned - begin
        self._ready.set()
        for run in new:
            run.sample()
            self._note_change(run)
            if self._over.wait(_PAUSE_S):
                break

    def _note_change(self, run: FollowedRun) -> None:
        self._version += 1
        run.version = self._version

    def _follow(self) -> None:
        wait_s = 0.0
        while not self._over.wait(wait_s):
            wait_s = _POLL_S * (not self.refresh())
