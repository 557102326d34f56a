"""Output of the commands: results and progress on stdout, notices and errors on stderr."""

from __future__ import annotations

import logging
import os
import signal
import sys
from typing import TYPE_CHECKING

from rich.console import Console

from headwater.core.errors import HeadwaterError, StoreError, StreamError
from headwater.core.terminal import silence

if TYPE_CHECKING:
    from headwater.config.run import RunConfig
    from headwater.config.user import UserConfig

BAD_INPUT, FAILURE = 2, 1


def open_console(config: RunConfig | UserConfig) -> Console | None:
    """Set up logging, print the notices of the params, and return the console for progress.

    The console is `None` if the log level is above INFO. The notices are always printed.
    """
    for notice in config.notices:
        print(f"note: {notice}", file=sys.stderr)
    level = config.init.logging.log_level
    console = _RunConsole(highlight=False) if level in ("DEBUG", "INFO") else None
    _log_to(console, level)
    return console


class _RunConsole(Console):
    """The console of a run, which ends as after Ctrl-C if the reader of stdout has ended (`| head`)."""

    def on_broken_pipe(self) -> None:
        # rich would end the process here, and the run would lose its steps since the last checkpoint.
        silence(sys.stdout.fileno())
        print("the reader of the output has ended, so the run ends too", file=sys.stderr)
        # Not `raise_signal`: a log message may come from another thread.
        os.kill(os.getpid(), signal.SIGINT)


def print_error(error: HeadwaterError) -> int:
    """Print an error on stderr and return the exit code."""
    print(f"error: {error}", file=sys.stderr)
    return FAILURE if isinstance(error, StoreError | StreamError) else BAD_INPUT


def _log_to(console: Console | None, level: str) -> None:
    logger = logging.getLogger("headwater")
    logger.setLevel(level)
    # Not `addHandler`: after a second call, each message would be printed twice.
    logger.handlers = [_ConsoleHandler(console)]


class _ConsoleHandler(logging.Handler):
    """A log handler that prints plain messages above a progress bar, and warnings on stderr."""

    def __init__(self, console: Console | None) -> None:
        super().__init__()
        self._errors = Console(stderr=True, highlight=False)
        self._console = console or self._errors

    def emit(self, record: logging.LogRecord) -> None:
        console = self._errors if record.levelno >= logging.WARNING else self._console
        console.print(self.format(record), markup=False, soft_wrap=True)
