"""Child processes of a comparison: a crash or a hang of the model ends a child, not the comparison."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from headwater.conform.child import Request
from headwater.conform.record import Shown


@dataclasses.dataclass(frozen=True)
class Run:
    """The result of a child process.

    Attributes:
        status: `ok`, `refused`, `failed`, `crashed` or `timed out`.
        shown: values, if it is ok.
        message: why it is not ok.
        trace: of an error that is not the project's own, or of a crash.
    """

    status: str
    shown: list[Shown]
    message: str = ""
    trace: str = ""


def run_child(request: Request, limit_s: float) -> Run:
    """Run a request in a separate process.

    Args:
        request: what to run; its result file must not exist.
        limit_s: seconds after which the process is killed.
    """
    result = Path(request.result)
    request_file = result.with_suffix(".json")
    request_file.write_text(json.dumps(dataclasses.asdict(request)))
    errors = result.with_suffix(".stderr")
    with errors.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "headwater.conform.child", str(request_file)],
            stdin=subprocess.DEVNULL,
            stdout=stderr,
            stderr=stderr,
            start_new_session=True,
        )
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return Run("timed out", [], f"no result after {limit_s:.0f} s")
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if not result.exists():
        return Run("crashed", [], _ended(process.returncode), _tail(errors))
    found: dict[str, Any] = torch.load(result, weights_only=True)
    result.unlink()
    return Run(found["status"], found.get("shown", []), found.get("message", ""), found.get("trace", ""))


def _ended(code: int) -> str:
    """Return how a process ended."""
    if code < 0:
        return f"the process was ended by {signal.Signals(-code).name}"
    return f"the process ended with exit code {code} and no result"


def _tail(file: Path) -> str:
    """Return the last lines that a process wrote."""
    return "\n".join(file.read_text(errors="replace").splitlines()[-30:])
