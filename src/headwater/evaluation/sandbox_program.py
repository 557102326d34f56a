"""Runs the text of a program inside the sandbox. A script of Python's own modules."""

from __future__ import annotations

import json
import os
import sys
import types


def main(content: int, report: int) -> None:
    """Run a program, and write its token to `report` if it came to its end.

    A program that raises an error, exits or is killed never gets to its end.

    Args:
        content: file descriptor of the program, as JSON.
        report: file descriptor of the report.
    """
    with os.fdopen(content) as file:
        job = json.load(file)
    sys.path += job["paths"]
    sys.argv = ["program"]
    own = os.getpid()
    module = types.ModuleType("program")
    sys.modules["program"] = module
    os.write(report, b"started\n")
    exec(compile(job["program"], "program", "exec"), module.__dict__)
    # A forked copy of the program has no report to make.
    if os.getpid() == own:
        os.write(report, job["token"].encode())


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
