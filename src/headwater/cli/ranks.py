"""What a process becomes that starts its command as several ranks; see `become_launcher`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from headwater.cli.main import guarded
from headwater.core.placement import Placement
from headwater.fabric.launch import launch
from headwater.fabric.streams import OF_SCRIPT, STDIN, STDOUT, silence


def main(argv: Sequence[str]) -> int:
    """Run a command as several ranks; returns its exit code.

    That of a script can print nothing meanwhile; see [Note: ranks of a script].

    Args:
        argv: `script` or `command`, the numbers of compute ranks, store ranks and restarts, where the first
            was written, and the command without the interpreter.
    """
    kind, num_csx, num_memx, max_restarts, where, *command = argv
    if kind == "script":
        os.environ[OF_SCRIPT] = "1"
        os.dup2(STDOUT, STDIN)  # ranks inherit three open files alone
        silence(STDOUT)
    placement = Placement(int(num_csx), int(num_memx))
    return guarded(lambda: launch(placement, command, where=where, max_restarts=int(max_restarts)))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
