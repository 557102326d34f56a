"""The program of a launcher process, which runs a command on several ranks; see `become_launcher`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from headwater.cli.main import guarded
from headwater.core.placement import Placement
from headwater.core.terminal import silence
from headwater.fabric.launch.launcher import launch
from headwater.fabric.launch.streams import OF_SCRIPT, STDIN, STDOUT


def main(argv: Sequence[str]) -> int:
    """Run a command as several ranks and return its exit code.

    The launcher of a script prints nothing itself; see [Note: ranks of a script].

    Args:
        argv: `script` or `command`; the numbers of compute ranks, store ranks and restarts; the place where
            the user set the number of compute ranks (for errors); and the command without the interpreter.
    """
    kind, num_csx, num_memx, max_restarts, where, *command = argv
    if kind == "script":
        os.environ[OF_SCRIPT] = "1"
        os.dup2(STDOUT, STDIN)  # ranks inherit only the three standard streams
        silence(STDOUT)
    placement = Placement(int(num_csx), int(num_memx))
    return guarded(lambda: launch(placement, command, where=where, max_restarts=int(max_restarts)))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
