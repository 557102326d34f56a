"""What `headwater plan` does once it has a plan: print it, and draw it where asked."""

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

    Raises:
        ConfigError: if it is to be drawn and matplotlib is not installed.
    """
    console = console or Console()
    console.print(render_plan(plan, run))
    if drawing is not None:
        draw_plan(plan, drawing)
        console.print(f"drawn in {drawing}")
