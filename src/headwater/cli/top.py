"""`headwater jobs top`: a live view of the CSXs, the running jobs with loss and rate, and the queue."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from headwater.appliance.queue import Queue
from headwater.appliance.types import Job, Phase
from headwater.cli.job_output import short_time
from headwater.trainer.history import read_last_steps
from headwater.trainer.run_dir import RunDir

_REFRESH_S = 1.0
_STEPS = 10
"""Number of last steps over which the rate is averaged."""
_LONG = ("LABELS", "REASON", "SYSTEMS")
"""Columns that are wrapped if the terminal is too narrow."""
_UNKNOWN = ("-", "-", "-")
_OVER = 5
"""Number of ended jobs that are shown."""


def show(queue: Queue, *, once: bool, has_histories: bool = True) -> int:
    """Show frames until Ctrl-C, or one frame if `once` is set; return the exit code.

    Args:
        queue: the queue.
        once: true for one frame.
        has_histories: true if the model_dirs of the jobs are on this machine.
    """
    console = Console(highlight=False)
    if once:
        console.print(frame(queue, has_histories=has_histories))
        return 0
    live = Live(
        frame(queue, has_histories=has_histories),
        console=console,
        auto_refresh=False,
        screen=console.is_terminal,
    )
    with live, suppress(KeyboardInterrupt):
        while True:
            time.sleep(_REFRESH_S)
            live.update(frame(queue, has_histories=has_histories), refresh=True)
    return 0


def frame(queue: Queue, *, has_histories: bool = True) -> RenderableType:
    """Return the current content of the view; see `show` for the arguments."""
    jobs = queue.jobs(everything=True)
    running = [job for job in jobs if job.phase in (Phase.INITIALIZING, Phase.RUNNING)]
    waiting = sorted(
        (job for job in jobs if job.phase in (Phase.CREATED, Phase.QUEUED)),
        key=lambda job: (job.priority, job.created),
    )
    over = [job for job in jobs if job.phase.over][-_OVER:]
    busy = sum(job.num_csx for job in running)
    parts: list[RenderableType] = [
        Text(f"CSXs: {busy} of {queue.num_csx()} busy   running: {len(running)}   waiting: {len(waiting)}")
    ]
    if running:
        parts += [Text(), _running_table(running, has_histories)]
    if waiting:
        parts += [Text(), _waiting_table(waiting)]
    if over:
        parts += [Text(), _over_table(over)]
    return Group(*parts)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=column not in _LONG)
    return table


def _running_table(jobs: Sequence[Job], has_histories: bool) -> Table:
    table = _table("RUNNING", "USER", "SYSTEMS", "DURATION", "STEP", "LOSS", "RATE", "LABELS")
    for job in jobs:
        duration = short_time(time.time() - job.started) if job.started else "-"
        done = progress(job) if has_histories else _UNKNOWN
        table.add_row(job.name, job.user, ",".join(job.systems), duration, *done, _labels(job))
    return table


def _waiting_table(jobs: Sequence[Job]) -> Table:
    table = _table("WAITING", "USER", "CSXS", "AGE", "PRIORITY", "LABELS")
    for job in jobs:
        age = short_time(time.time() - job.created)
        table.add_row(job.name, job.user, str(job.num_csx), age, job.priority, _labels(job))
    return table


def _over_table(jobs: Sequence[Job]) -> Table:
    table = _table("OVER", "USER", "PHASE", "REASON")
    for job in jobs:
        table.add_row(job.name, job.user, job.phase, job.reason or "-")
    return table


def progress(job: Job) -> tuple[str, str, str]:
    """Return step, loss and rate of a job from the history in its model_dir; dashes without a history."""
    steps = read_last_steps(RunDir(job.model_dir).history, _STEPS) if job.model_dir else []
    if not steps:
        return _UNKNOWN
    (_, unit), seconds = steps[-1].rate, sum(step.step_s for step in steps)
    count = sum(step.rate[0] * step.step_s for step in steps)
    return str(steps[-1].step), f"{steps[-1].loss:.4f}", f"{count / seconds:,.0f} {unit}/s"


def _labels(job: Job) -> str:
    return ",".join(f"{name}={value}" for name, value in job.labels.items()) or "-"
