"""The files of a folder of runs, as the page shows them: which runs there are, logs, samples, pictures."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from headwater.core.files import is_file
from headwater.trainer.run_dir import RunDir

_LOG_BYTES = 1 << 16
_SAMPLES_BYTES = 8 << 20
_SAMPLES = 20
_LONGEST_TEXT = 4000
_NOT_RUNS = re.compile(r"checkpoint_.*|profile|wandb|mlruns|\..*")
"""Names of folders that are not searched for runs."""
_PARTS_OF_RUNS = ("train", "eval")
"""Folders of a run with TensorBoard's events, which are not searched for runs either."""


def find_runs(folder: Path) -> Iterator[str]:
    """Yield the relative paths of the folders below `folder` that hold a history. Links are not followed."""
    for path, folders, files in os.walk(folder):
        history = RunDir(Path(path)).history
        is_run = history.name in files and is_file(history)
        parts = _PARTS_OF_RUNS if is_run else ()
        folders[:] = sorted(name for name in folders if name not in parts and not _NOT_RUNS.fullmatch(name))
        if is_run:
            yield Path(path).relative_to(folder).as_posix()


def logs(run: RunDir) -> list[str]:
    """Return the names of the log files of a run, such as those of its jobs; the newest last."""
    return [path.name for path in _by_age(run.path.glob("*.log"))]


def _by_age(paths: Iterable[Path]) -> list[Path]:
    """Return the regular files among some paths, the newest last. Leave out files that vanish meanwhile."""
    found = []
    for path in paths:
        with suppress(OSError):
            if is_file(path):
                found.append((path.stat().st_mtime, path))
    return [path for _, path in sorted(found)]


def end_of_log(path: Path) -> str:
    """Return the last 64 KiB of a log.

    Raises:
        OSError: if the log cannot be read.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - _LOG_BYTES))
        if size > _LOG_BYTES:
            file.readline()  # a line that begins before the part that is shown
        return file.read(_LOG_BYTES).decode(errors="replace")


def timeline(run: RunDir) -> Path | None:
    """Return the newest picture of a profiled step; `None` if no step was profiled."""
    return next(reversed(_by_age(run.profile.glob("**/timeline.png"))), None)


def plan_text(run: RunDir) -> str:
    """Return the plan as text; an empty text if the run has not been planned."""
    try:
        return run.plan.read_text(encoding="utf-8", errors="replace")[:_LOG_BYTES]
    except OSError:
        return ""


def samples(run: RunDir) -> list[dict[str, str]]:
    """Return texts that the model generated, from the newest file of samples of an evaluation on tasks.

    Returns:
        Records with the keys `source` (name of the file), `prompt` and `text`; at most 20.
    """
    for path in reversed(_by_age(run.path.glob("*_*.json"))):
        found = list(_samples_in(path))
        if found:
            return found
    return []


def _samples_in(path: Path) -> Iterator[dict[str, str]]:
    """Yield the first samples in a file of lm-evaluation-harness; nothing if it is another file."""
    try:
        if path.stat().st_size > _SAMPLES_BYTES:
            return
        records = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return
    for record in records[:_SAMPLES] if isinstance(records, list) else ():
        if isinstance(record, dict) and {"arguments", "filtered_resps"} <= record.keys():
            prompt, text = _first_text(record["arguments"]), _first_text(record["filtered_resps"])
            yield {"source": path.name, "prompt": prompt[-_LONGEST_TEXT:], "text": text[:_LONGEST_TEXT]}


def _first_text(value: Any) -> str:
    """Return the first value in nested lists and mappings, as text."""
    while isinstance(value, list | dict) and value:
        value = value[0] if isinstance(value, list) else next(iter(value.values()))
    return value if isinstance(value, str) else str(value)
