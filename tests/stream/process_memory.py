"""Memory of this process, and the start of scripts that measure theirs."""

import json
import os
import subprocess
import sys
from pathlib import Path


def outputs_of(script, *words, mmap_threshold):
    """Run a script in a new process, and return the values that it prints, one JSON line each.

    Args:
        script: the script. It can import the modules of this folder.
        words: its arguments.
        mmap_threshold: bytes from which on freed memory goes back to the system at once.
    """
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": str(mmap_threshold)},
        cwd=Path(__file__).parent,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def resident_bytes():
    """Return the bytes of memory that this process has now."""
    return _status("VmRSS")


def peak_bytes():
    """Return the most bytes that this process has had since the last `reset_peak`."""
    return _status("VmHWM")


def reset_peak():
    """Forget the peak of this process so far, and return the bytes that it has now."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident_bytes()


def _status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(key))
