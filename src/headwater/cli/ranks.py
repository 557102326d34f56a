"""What a script becomes that says on how many ranks it runs; see [Note: ranks of a script]."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from headwater.cli.main import guarded
from headwater.core.placement import Placement
from headwater.fabric.launch import launch
from headwater.fabric.script import LAUNCHER, STDIN, STDOUT, silence


def main(argv: Sequence[str]) -> int:
    """Run a script as several ranks; returns its exit code. Here nothing can be printed meanwhile.

    Args:
        argv: the number, where it was written, and the command without the interpreter.
    """
    num_csx, where, *command = argv
    os.environ[LAUNCHER] = str(os.getpid())
    os.dup2(STDOUT, STDIN)  # ranks inherit three open files alone
    silence(STDOUT)
    return guarded(lambda: launch(Placement(int(num_csx)), command, where=where))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
