"""Tables of a profile for the console."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from headwater.core.tables import titled_table
from headwater.core.units import MIB
from headwater.profiler.summary import Row, StageWork, Summary

MOST_ROWS = 10


def print_tables(console: Console, summary: Summary, num_ranks: int = 1) -> None:
    """Print the table of modules, and that of stages if there are any.

    Args:
        console: where to print.
        summary: the times of a rank: the slowest one of several.
        num_ranks: number of ranks.
    """
    console.print(module_table(summary, num_ranks))
    if summary.stages:
        console.print()
        console.print(stage_table(summary, num_ranks))


def module_table(summary: Summary, num_ranks: int = 1) -> Table:
    """Return a table of the most expensive modules and of all other work. The shares add up to 100 %.

    Args:
        summary: the times of a rank: the slowest one of several.
        num_ranks: number of ranks.
    """
    shown, hidden = summary.modules[:MOST_ROWS], summary.modules[MOST_ROWS:]
    table = titled_table(_title("Time", summary, num_ranks))
    table.add_column("")
    table.add_column("PyTorch module", overflow="fold")
    # Rows of whole stages alone have known FLOPs, with `depth: 0`.
    rates = ["GFLOP/s"] if any(row.flops for row in shown) else []
    for name in ("time, ms", "% of step", "calls", "wait, ms", *rates):
        table.add_column(name, justify="right")
    for number, row in enumerate(shown):
        table.add_row(str(number), *_module_cells(summary, row)[: 5 + len(rates)])
    if hidden:
        seconds, wait_s = (sum(getattr(row, name) for row in hidden) for name in ("seconds", "wait_s"))
        others = Row(f"{len(hidden)} other rows of modules", seconds, wait_s=wait_s)
        table.add_row("", *_module_cells(summary, others)[:5])
    for row in summary.others:
        table.add_row("", *_module_cells(summary, row)[:5])
    table.add_row("", *_module_cells(summary, Row("step", summary.whole_s))[:5], style="bold")
    return table


def stage_table(summary: Summary, num_ranks: int = 1) -> Table:
    """Return a table of the most expensive stages: their computation, waits, updates and transfers.

    Args:
        summary: the times of a rank: the slowest one of several.
        num_ranks: number of ranks.
    """
    table = titled_table(_title("Stages (ms; weights, gradients and disk in MiB)", summary, num_ranks))
    # Short names, few digits and one space between columns: the table has 80 characters where the output is
    # not a terminal, and names such as `position_embedding` must fit.
    table.padding = (0, 1, 0, 0)
    table.add_column("stage", overflow="fold")
    for name in ("forward", "backward", "wait", "update", "GFLOP/s", "weights", "gradients", "disk"):
        table.add_column(name, justify="right")
    stages = sorted(summary.stages, key=lambda stage: -(stage.compute_s + stage.wait_s))
    for stage in stages[:MOST_ROWS]:
        table.add_row(*_stage_cells(summary, stage))
    hidden = stages[MOST_ROWS:]
    if hidden:
        table.add_row(*_stage_cells(summary, _sum(hidden)))
    return table


def _title(what: str, summary: Summary, num_ranks: int) -> str:
    first, last = summary.steps[0], summary.steps[-1]
    steps = f"step {first}" if first == last else f"steps {first} to {last}, mean of a step"
    rank = "" if num_ranks == 1 else f"; rank {summary.rank}, the slowest of {num_ranks} ranks"
    return f"{what} of {steps}{rank}"


def _module_cells(summary: Summary, row: Row) -> tuple[str, ...]:
    count = len(summary.steps)
    rate = f"{1e-9 * row.flops / row.seconds:.1f}" if row.flops and row.seconds else ""
    calls = f"{row.calls / count:g}" if row.calls else ""
    share, wait = f"{100 * row.seconds / summary.whole_s:.2f}", _milliseconds(row.wait_s, count)
    return row.name, f"{1e3 * row.seconds / count:.3f}", share, calls, wait, rate


def _stage_cells(summary: Summary, stage: StageWork) -> tuple[str, ...]:
    count = len(summary.steps)
    times = (stage.forward_s, stage.backward_s, stage.wait_s, stage.update_s)
    moved = (stage.weight_bytes, stage.gradient_bytes, stage.disk_bytes)
    rate = f"{1e-9 * stage.flops / stage.compute_s:.1f}" if stage.flops and stage.compute_s else ""
    return (
        stage.name or "(the model itself)",
        *(f"{1e3 * seconds / count:.1f}" for seconds in times),
        rate,
        *(f"{size / count / MIB:.1f}" if size else "" for size in moved),
    )


def _milliseconds(seconds: float, count: int) -> str:
    return f"{1e3 * seconds / count:.3f}" if seconds else ""


def _sum(stages: Sequence[StageWork]) -> StageWork:
    """Return the work of several stages as that of one."""
    fields = dataclasses.fields(StageWork)[1:]
    sums = {field.name: sum(getattr(stage, field.name) for stage in stages) for field in fields}
    return StageWork(f"{len(stages)} other stages", **sums)
