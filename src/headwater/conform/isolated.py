"""Runs in child processes. If the model crashes or hangs, a child ends, but not the comparison."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from headwater.conform.child import RANKS, Request, main
from headwater.conform.record import Shown
from headwater.core.safe_path import safe_path

PRELOADED = [
    "headwater.conform.child",
    "torch._dynamo",
    "torch.fx.experimental.symbolic_shapes",  # these two are imported by the first dry run
]
"""Modules that a process imports before it forks for runs."""


@dataclasses.dataclass(frozen=True)
class Run:
    """The result of a child process.

    Attributes:
        status: `ok`, `refused`, `failed`, `crashed` or `timed out`.
        shown: the recorded values, if the status is `ok`.
        message: the error, for any other status.
        trace: the traceback of an error that is not one of the project's exceptions, or the last output
            before a crash.
    """

    status: str
    shown: list[Shown]
    message: str = ""
    trace: str = ""


def run_child(request: Request, limit_s: float) -> Run:
    """Run a request in a separate process.

    Args:
        request: the run; its result file must not exist.
        limit_s: seconds after which the process is killed.
    """
    result = Path(request.result)
    request_file = result.with_suffix(".json")
    request_file.write_text(json.dumps(dataclasses.asdict(request)))
    errors = result.with_suffix(".stderr")
    start = _start_interpreter if request.run == RANKS else _fork
    code = start(request_file, errors, limit_s)
    if code is None:
        return Run("timed out", [], f"no result after {limit_s:.0f} s")
    # The result decides, not the exit code: a process may crash at its exit after it has written the result.
    if not result.exists():
        return Run("crashed", [], _ended(code), _tail(errors))
    found: dict[str, Any] = torch.load(result, weights_only=True)
    result.unlink()
    return Run(found["status"], found.get("shown", []), found.get("message", ""), found.get("trace", ""))


def _fork(request_file: Path, errors: Path, limit_s: float) -> int | None:
    """Run a request in a fork of a server process and return its exit code; `None` after the time limit.

    The server has imported torch and Headwater, but no module of the user. So every run begins in the same
    state, and no run waits for an interpreter to start. Each process does only one run: a user's module may
    keep state from one run to the next, and a crash would end the other runs too.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=_run_forked, args=(request_file, errors, dict(os.environ)))
    with safe_path():  # the first run starts the server
        process.start()
    try:
        process.join(limit_s)
        return process.exitcode
    finally:
        if process.exitcode is None:
            assert process.pid is not None, "the process has started"
            with contextlib.suppress(ProcessLookupError):  # no process group before its first statement
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()


def _run_forked(request_file: Path, errors: Path, environment: Mapping[str, str]) -> None:
    """Run a request; this is the main function of a forked process."""
    # After the time limit `_fork` kills this group, with all processes that the model has started.
    os.setsid()
    os.environ.clear()  # the server's variables are those of its start
    os.environ.update(environment)
    with errors.open("wb") as output, Path(os.devnull).open("rb") as nothing:
        for source, number in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(source.fileno(), number)
    main(request_file)


def _start_interpreter(request_file: Path, errors: Path, limit_s: float) -> int | None:
    """Run a request in a new interpreter and return its exit code; `None` after the time limit.

    Ranks need this: their launcher starts each rank with the command of this interpreter.
    """
    with errors.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "headwater.conform.child", str(request_file)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _ended(code: int) -> str:
    """Return a phrase that says how a process ended: its exit code or signal."""
    if code < 0:
        return f"the process was ended by {signal.Signals(-code).name}"
    return f"the process ended with exit code {code} and no result"


def _tail(file: Path) -> str:
    """Return the last lines that a process wrote."""
    return "\n".join(file.read_text(errors="replace").splitlines()[-30:])
