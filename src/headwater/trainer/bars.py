"""Progress bars that change in place: on a terminal and in a notebook."""

from __future__ import annotations

import html
import time
from typing import TYPE_CHECKING, Protocol, final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column

from headwater.core.units import format_duration

if TYPE_CHECKING:
    from IPython.display import DisplayHandle

_NOTEBOOK_S = 0.2
"""Seconds between two messages to a notebook. The browser draws each of them."""


class Bar(Protocol):
    """Interface: a bar that shows how many steps are done."""

    def start(self, done: int, total: int) -> None:
        """Show the bar."""
        ...

    def update(self, done: int, text: str, left_s: float) -> None:
        """Show the number of finished steps, a text, and the predicted seconds until the last step."""
        ...

    def stop(self) -> None:
        """Leave the bar as it is."""
        ...


def make_bar(console: Console) -> Bar | None:
    """Return a bar for a console; `None` for a file or a pipe, in which nothing changes in place."""
    if console.is_jupyter:
        return NotebookBar()
    return TerminalBar(console) if console.is_terminal else None


@final
class TerminalBar:
    """A bar on a terminal. Lines that the console prints meanwhile appear above it.

    Args:
        console: the terminal.
    """

    def __init__(self, console: Console) -> None:
        text = TextColumn("{task.description}", table_column=Column(overflow="fold"))
        # A narrow bar: loss, rate and memory have to fit beside it in 80 columns.
        columns = (BarColumn(10), MofNCompleteColumn(), text, TimeRemainingColumn())
        self._bar = Progress(*columns, console=console)
        self._task = TaskID(0)

    def start(self, done: int, total: int) -> None:
        self._task = self._bar.add_task("", total=total, completed=done)
        self._bar.start()

    def update(self, done: int, text: str, left_s: float) -> None:
        self._bar.update(self._task, completed=done, description=text)

    def stop(self) -> None:
        self._bar.stop()


@final
class NotebookBar:
    """A bar in the output of a notebook's cell. It needs IPython, which every notebook has."""

    def __init__(self) -> None:
        self._handle: DisplayHandle | None = None
        self._done, self._total, self._text = 0, 0, ""
        self._sent = 0.0

    def start(self, done: int, total: int) -> None:
        from IPython.display import display

        self._done, self._total = done, total
        self._handle = display(self._bundle(), raw=True, display_id=True)

    def update(self, done: int, text: str, left_s: float) -> None:
        left = f"  {format_duration(left_s)} left" if left_s else ""
        self._done, self._text = done, text + left
        if time.monotonic() - self._sent >= _NOTEBOOK_S:
            self._show()

    def stop(self) -> None:
        self._show()

    def _show(self) -> None:
        # IPython returns no handle outside of a notebook's kernel.
        if self._handle is not None:
            self._handle.update(self._bundle(), raw=True)
            self._sent = time.monotonic()

    def _bundle(self) -> dict[str, str]:
        """Return the bar as HTML, and as text for programs that show no HTML."""
        count = f"{self._done}/{self._total}"
        bar = f'<progress value="{self._done}" max="{self._total}"></progress>'
        return {
            "text/html": f"{bar} {count} {html.escape(self._text)}",
            "text/plain": f"{count}  {self._text}",
        }
