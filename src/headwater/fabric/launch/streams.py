"""Standard streams of a script's ranks, and the variable that marks them. See [Note: ranks of a script]."""

from __future__ import annotations

import os

OF_SCRIPT = "HEADWATER_SCRIPT"
"""Environment variable: set in the ranks of a script, by their launcher."""

STDIN, STDOUT, STDERR = 0, 1, 2
"""File descriptors. A rank of a script gets the launcher's stdout as its stdin, and never reads from it."""


def silence(file: int) -> None:
    """Redirect a file descriptor to /dev/null."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, file)
    os.close(nowhere)
