"""Prints a plan for `headwater plan`, and draws it if requested."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from headwater.plan.outlook import RunLength
from headwater.plan.report import draw_plan, render_plan
from headwater.plan.types import Plan


def describe(
    plan: Plan, run: RunLength | None = None, *, console: Console | None = None, drawing: Path | None = None
) -> None:
    """Print a plan, and draw it as a PNG at `drawing` if that is given.

    Args:
        plan: the plan.
        run: length of the run, for the time that it takes.
        console: where the plan is printed; by default stdout.
        drawing: path of the PNG.

    Raises:
        ConfigError: if a drawing is requested, but matplotlib is not installed.
    """
    console = console or Console()
    console.print(render_plan(plan, run))
    if drawing is not None:
        draw_plan(plan, drawing)
        console.print(f"drawn in {drawing}")
