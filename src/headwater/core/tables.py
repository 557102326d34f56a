"""The style of tables on the terminal."""

from __future__ import annotations

from rich.table import Table


def titled_table(title: str) -> Table:
    """Return an empty table without lines, whose title is bold and at the left."""
    return Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
