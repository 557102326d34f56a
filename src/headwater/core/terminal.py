"""Output of a process that is not wanted, or whose terminal may be closed while the process works."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import IO, Any


class _Terminal(io.FileIO):
    """A terminal to write to. After it has been closed, the process writes to `/dev/null` instead.

    Without this, each print would raise an error, and a run would end because its window is gone.
    """

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            silence(self.fileno())
            return super().write(data)


def silence(file: int) -> None:
    """Redirect a file descriptor to /dev/null."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, file)
    os.close(nowhere)


def outlive_terminal() -> None:
    """Make stdout and stderr outlive their terminal. Later output is lost, without an error."""
    sys.stdout, sys.stderr = _outliving(sys.stdout), _outliving(sys.stderr)


def _outliving(stream: Any) -> Any:
    """Return a stream that writes to the same terminal and outlives it. Return other streams unchanged."""
    if not isinstance(stream, io.TextIOWrapper) or not stream.isatty():
        return stream
    stream.flush()
    buffer = io.BufferedWriter(_Terminal(stream.fileno(), "w", closefd=False))
    made: IO[str] = io.TextIOWrapper(buffer, stream.encoding, stream.errors, line_buffering=True)
    return made
