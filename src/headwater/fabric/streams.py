"""Open files of a script's ranks, and how they know that they are ranks. See [Note: ranks of a script]."""

from __future__ import annotations

import os

OF_SCRIPT = "HEADWATER_SCRIPT"
"""Environment variable: set where a launcher has started this script as one of its ranks."""

STDIN, STDOUT, STDERR = 0, 1, 2
"""Open files. A rank finds at the first what is the second's of the launcher, and nobody reads there."""


def silence(file: int) -> None:
    """Let nothing more come to an open file or from it."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, file)
    os.close(nowhere)
