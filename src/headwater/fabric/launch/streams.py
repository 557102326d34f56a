"""Standard streams of a script's ranks, and the variable that marks them. See [Note: ranks of a script]."""

from __future__ import annotations

OF_SCRIPT = "HEADWATER_SCRIPT"
"""Environment variable that the launcher sets in the ranks of a script, to mark them."""

STDIN, STDOUT, STDERR = 0, 1, 2
"""File descriptors. A rank of a script has the launcher's stdout as its descriptor 0, and never reads it."""
