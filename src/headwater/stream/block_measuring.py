"""Measurement of a block in a child process, which is killed if it takes too long, or if this process ends.

The compiler and its memory end with that process. A run that stays eager never loads the compiler.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress

from headwater.plan.compilation import BlockTimes
from headwater.stream import block_probe
from headwater.stream.block_probe import Conditions

MOST_WALL_S = 240.0
"""Seconds after which a measurement is stopped."""


def measure_block(
    packed: bytes, conditions: Conditions, *, most_wall_s: float = MOST_WALL_S
) -> BlockTimes | str:
    """Return the times of a packed call, measured in another process. If that fails, return the reason.

    Args:
        packed: the call, as `pack` returns it.
        conditions: the settings of the measurement.
        most_wall_s: seconds after which the process is killed.
    """
    header = json.dumps(dataclasses.asdict(conditions)).encode() + b"\n"
    # For `-P` see [Note: planted modules]. A separate session, because the compiler starts processes too.
    with subprocess.Popen(
        [sys.executable, "-P", "-m", block_probe.__name__, str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(header + packed, timeout=most_wall_s)
        except subprocess.TimeoutExpired:
            return f"a block was not compiled and measured within {most_wall_s:g} s"
        finally:
            # This is needed even if the process has ended: processes of the compiler may be left.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode != 0:
        return f"a block could not be compiled and measured: {_reason(errors, process.returncode)}"
    return BlockTimes(**json.loads(output))


def _reason(errors: bytes, code: int) -> str:
    """Return the reason for which the process has ended."""
    if code < 0:
        return f"its process was ended by {signal.Signals(-code).name}"
    # The error of a traceback is its last line that is not indented; advice follows.
    lines = [line for line in errors.decode(errors="replace").splitlines() if line[:1].strip()]
    return (lines or [f"its process ended with exit status {code}"])[-1]
