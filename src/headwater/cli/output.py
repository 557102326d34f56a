"""What the commands print: results and progress on stdout, notices and errors on stderr."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

from rich.console import Console

from headwater.core.errors import HeadwaterError, StoreError, StreamError

if TYPE_CHECKING:
    from headwater.config import RunConfig
    from headwater.config.user import UserConfig

BAD_INPUT, FAILURE = 2, 1


def open_console(config: RunConfig | UserConfig) -> Console | None:
    """The console that the log level of the params asks for; `None` where it asks for silence.

    The notices of the params are printed, whatever it asks for.
    """
    for notice in config.notices:
        print(f"note: {notice}", file=sys.stderr)
    level = config.init.logging.log_level
    console = Console(highlight=False) if level in ("DEBUG", "INFO") else None
    _log_to(console, level)
    return console


def print_error(error: HeadwaterError) -> int:
    """Say what is wrong; returns the exit code."""
    print(f"error: {error}", file=sys.stderr)
    return FAILURE if isinstance(error, StoreError | StreamError) else BAD_INPUT


def _log_to(console: Console | None, level: str) -> None:
    logger = logging.getLogger("headwater")
    logger.setLevel(level)
    logger.handlers = [_ConsoleHandler(console)]


class _ConsoleHandler(logging.Handler):
    """Prints messages above a progress bar, if there is one, and without decoration; warnings to stderr."""

    def __init__(self, console: Console | None) -> None:
        super().__init__()
        self._errors = Console(stderr=True, highlight=False)
        self._console = console or self._errors

    def emit(self, record: logging.LogRecord) -> None:
        console = self._errors if record.levelno >= logging.WARNING else self._console
        console.print(self.format(record), markup=False, soft_wrap=True)
