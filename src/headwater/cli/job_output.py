"""Formats of lists of jobs: a table like that of csctl, JSON and YAML."""

from __future__ import annotations

import datetime
import json
import re
import time
from collections.abc import Sequence
from typing import Any

import yaml

from headwater.appliance.types import Job
from headwater.core.errors import shorten

COLUMNS = ("NAME", "AGE", "DURATION", "PHASE", "SYSTEMS", "PRIORITY", "USER", "LABELS")
FORMATS = ("table", "json", "yaml")
_GAP = "   "
_FIRST_LINE = re.compile(r"job wsjob-\d+ on csx-\d+(, csx-\d+)*")
_LAST_LINES, _MAX_CHARS = 20, 500
_TIMES = ("created", "started", "ended")
_LONGEST = ((120, 1, "s"), (3 * 3600, 60, "m"), (48 * 3600, 3600, "h"))


def show_jobs(jobs: Sequence[Job], style: str, *, reasons: bool = False) -> str:
    """Return a list of jobs as text.

    Args:
        jobs: the jobs.
        style: one of `FORMATS`.
        reasons: true to add the column `REASON` to a table.
    """
    if style == "table" and reasons:
        return render_table([(*COLUMNS, "REASON"), *([*row(job), job.reason or ""] for job in jobs)])
    if style == "table":
        return render_table([COLUMNS, *(row(job) for job in jobs)])
    return show_records([record(job) for job in jobs], style)


def show_records(records: object, style: str) -> str:
    """Return plain data as text in JSON or YAML."""
    if style == "json":
        return json.dumps(records, indent=2)
    return yaml.safe_dump(records, sort_keys=False, allow_unicode=True).rstrip("\n")


def render_table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as text in columns. Empty cells become dashes, so each row has the same number of words."""
    rows = [[cell or "-" for cell in one] for one in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        _GAP.join(cell.ljust(width) for cell, width in zip(one, widths, strict=True)).rstrip() for one in rows
    )


def row(job: Job) -> list[str]:
    """Return the cells of a job's row."""
    now = time.time()
    return [
        job.name,
        short_time(now - job.created),
        short_time((job.ended or now) - job.started) if job.started else "",
        job.phase,
        ",".join(job.systems),
        job.priority,
        job.user,
        ",".join(f"{name}={value}" for name, value in job.labels.items()),
    ]


def record(job: Job) -> dict[str, Any]:
    """Return all fields of a job as plain data for JSON and YAML."""
    known = job.to_record()
    for name in _TIMES:
        if known[name] is not None:
            moment = datetime.datetime.fromtimestamp(known[name]).astimezone()
            known[name] = moment.isoformat(timespec="seconds")
    known.update(
        command=list(job.command),
        systems=list(job.systems),
        phase=str(job.phase),
        priority=str(job.priority),
        labels=dict(job.labels),
    )
    return known


def last_error(log: bytes) -> str | None:
    """Return the line that best says why a job failed; `None` if it has printed nothing.

    That is the last error of Headwater among the last lines, or else the last line.

    Args:
        log: the end of the job's output.
    """
    # The watcher writes the first line of each log.
    lines = [line.strip() for line in log.decode(errors="replace").splitlines()]
    lines = [line for line in lines if line and not _FIRST_LINE.fullmatch(line)][-_LAST_LINES:]
    errors = [line for line in lines if line.startswith("error: ")]
    found = (errors or lines)[-1:]
    return shorten(found[0], _MAX_CHARS) if found else None


def short_time(seconds: float) -> str:
    """Return a short text for a duration, with a unit that fits its size: 90s, 5m, 43h, 3d."""
    seconds = max(seconds, 0.0)
    for limit, unit, name in _LONGEST:
        if seconds < limit:
            return f"{int(seconds // unit)}{name}"
    return f"{int(seconds // 86400)}d"
