"""Programs written by a model, each in a process without network and without the files of the user."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import secrets
import selectors
import signal
import site
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, final

from headwater.config.base import expand_user
from headwater.core.errors import RunError
from headwater.evaluation.sandbox_setup import REFUSED

_SYSTEM_FOLDERS = ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/nix/store", "/gnu/store")
"""Folders with the system's libraries; those that exist are visible to a program."""
_START_S = 60.0
"""Maximum seconds until the interpreter of a program has started."""
_ENVIRONMENT = {
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PATH": "/usr/bin:/bin",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
_KEPT_BYTES = 4096
"""Bytes of each output that are kept; only the last ones matter."""


@dataclasses.dataclass(frozen=True)
class ProgramLimits:
    """Limits of one program.

    Attributes:
        seconds: time from its start to its end.
        memory: bytes of address space of each process.
        processes: processes and threads at once.
        file_size: bytes of each file that it writes.
        scratch: bytes of all files that it writes.
    """

    seconds: float = 3.0
    memory: int = 1 << 30
    processes: int = 8
    file_size: int = 16 << 20
    scratch: int = 64 << 20

    def of_system(self) -> dict[str, int]:
        """Return the values of the system's limits of a process, by name."""
        return {
            "RLIMIT_AS": self.memory,
            "RLIMIT_CORE": 0,
            "RLIMIT_CPU": math.ceil(self.seconds) + 1,
            "RLIMIT_FSIZE": self.file_size,
            "RLIMIT_NOFILE": 64,
            "RLIMIT_NPROC": self.processes,
        }


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of a program.

    Attributes:
        passed: True if the program ran to its end.
        result: `passed`, `timed out`, or `failed: ` with the reason.
    """

    passed: bool
    result: str


@final
class Sandbox:
    """Runs programs, each in a fresh interpreter.

    A program sees Python, its packages and the system's libraries, read-only, and an empty folder in memory.
    There are no other files, no network, and no processes but its own. What it prints is dropped.

    Args:
        limits: the limits of each program.

    Raises:
        RunError: if the folder of Python holds the home folder, which a program must not see.
    """

    def __init__(self, limits: ProgramLimits) -> None:
        self._limits = limits
        self._python = os.path.realpath(sys.executable)
        self._folders = _visible_folders()

    def check(self) -> None:
        """Run an empty program.

        Raises:
            RunError: if this machine does not allow the sandbox.
        """
        # Not the limits of the user: those may be too small for any program.
        outcome = self._run("", dataclasses.replace(self._limits, seconds=_START_S))
        if not outcome.passed:
            raise RunError(
                f"an empty program {outcome.result}",
                where="the sandbox of generated programs",
                remedy="raise memory_limit",
            )

    def run(self, program: str) -> Outcome:
        """Run a program and return its result.

        Raises:
            RunError: if this machine does not allow the sandbox.
        """
        return self._run(program, self._limits)

    def run_all(
        self, programs: Sequence[str], workers: int, done: Callable[[int], None] = lambda count: None
    ) -> list[Outcome]:
        """Run programs, `workers` at once, and return their results.

        Args:
            programs: the programs.
            workers: programs at once.
            done: called after each program with the number of programs that have ended.

        Raises:
            RunError: if this machine does not allow the sandbox.
        """
        found: list[Outcome] = []
        pool = ThreadPoolExecutor(workers, thread_name_prefix="sandbox")
        try:
            for outcome in pool.map(self.run, programs):
                found.append(outcome)
                done(len(found))
        finally:
            pool.shutdown(cancel_futures=True)
        return found

    def _run(self, program: str, limits: ProgramLimits) -> Outcome:
        token = secrets.token_hex(16)
        with tempfile.TemporaryDirectory(prefix="headwater-sandbox-") as root:
            process = _Process(self._job(program, token, root, limits), token, limits.seconds)
            try:
                process.watch()
            finally:
                process.end()
        return process.outcome()

    def _job(self, program: str, token: str, root: str, limits: ProgramLimits) -> dict[str, Any]:
        paths = [path for path in site.getsitepackages() if Path(path).is_dir()]
        return {
            "root": root,
            "folders": self._folders,
            "scratch": limits.scratch,
            "limits": limits.of_system(),
            "python": self._python,
            "environment": _ENVIRONMENT,
            "runner": Path(__file__).with_name("sandbox_program.py").read_text(encoding="utf-8"),
            "content": {"program": program, "token": token, "paths": [os.path.realpath(p) for p in paths]},
        }


@final
class _Process:
    """A program that runs, and what it has written."""

    def __init__(self, job: dict[str, Any], token: str, seconds: float) -> None:
        self._token = token.encode()
        self._seconds = seconds
        self._timed_out = False
        report, written = os.pipe()
        script = Path(__file__).with_name("sandbox_setup.py")
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(script), str(written)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(written,),
                start_new_session=True,
                env={},
                cwd="/",
            )
        except OSError:
            os.close(report)
            raise
        finally:
            os.close(written)
        assert self._process.stdin and self._process.stdout and self._process.stderr
        self._report = os.fdopen(report, "rb", buffering=0)
        self._streams = {
            "report": self._report,
            "setup": self._process.stdout,
            "errors": self._process.stderr,
        }
        self._text = dict.fromkeys(self._streams, b"")
        with suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(json.dumps(job).encode())

    @property
    def _started(self) -> bool:
        return self._text["report"].startswith(b"started\n")

    @property
    def _passed(self) -> bool:
        return self._text["report"] == b"started\n" + self._token

    def watch(self) -> None:
        """Wait until the program has passed, ended, or used its time."""
        deadline_s = time.monotonic() + _START_S
        started = False
        with selectors.DefaultSelector() as selector:
            for name, stream in self._streams.items():
                selector.register(stream, selectors.EVENT_READ, name)
            while "report" in {key.data for key in selector.get_map().values()} and not self._passed:
                ready = selector.select(deadline_s - time.monotonic())
                for key, _ in ready:
                    if not self._read(key.data):
                        selector.unregister(key.fileobj)
                if self._started and not started:
                    started, deadline_s = True, time.monotonic() + self._seconds
                if time.monotonic() >= deadline_s:
                    self._timed_out = not self._passed
                    return
        if not self._passed:
            with suppress(
                subprocess.TimeoutExpired
            ):  # for its exit code; a program may only close its report
                self._process.wait(1.0)

    def _read(self, name: str) -> bool:
        """Read a part of a stream; return False at its end."""
        part = os.read(self._streams[name].fileno(), 1 << 16)
        kept = self._text[name] + part
        # A report that is too long is not one of ours, and stays so.
        self._text[name] = kept[:_KEPT_BYTES] if name == "report" else kept[-_KEPT_BYTES:]
        return bool(part)

    def end(self) -> None:
        """Kill all processes of the program. The first one takes those in its namespace with it."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for name, stream in self._streams.items():
            while self._read(name):
                pass
            stream.close()

    def outcome(self) -> Outcome:
        """Return the result of the program.

        Raises:
            RunError: if it did not start.
        """
        code = self._process.returncode
        if not self._started:
            raise self._refused(code)
        if self._timed_out:
            return Outcome(False, "timed out")
        if self._passed:
            return Outcome(True, "passed")
        if code > 128:
            return Outcome(False, f"failed: ended by signal {code - 128}")
        reason = _reason(self._text["errors"].decode(errors="replace"))
        return Outcome(False, f"failed: {reason[:300] or 'it ended before its tests'}")

    def _refused(self, code: int) -> RunError:
        name = "setup" if code == REFUSED else "errors"
        lines = self._text[name].decode(errors="replace").strip().splitlines() or [f"exit code {code}"]
        return RunError(
            f"this machine does not allow a sandbox for generated programs: {lines[-1]}",
            where="allow_code_execution",
            remedy="allow user namespaces (sysctl user.max_user_namespaces, "
            "kernel.apparmor_restrict_unprivileged_userns=0; in a container: its seccomp profile), or "
            "write the generations here and evaluate them on another machine with --load_generations_path",
        )


def _reason(errors: str) -> str:
    """Return the line that names the error in what a program wrote, or an empty text if it wrote nothing.

    The line is usually the last one. But the end of a program kills its other processes, perhaps in the
    middle of their tracebacks, so lines of a traceback may follow.
    """
    lines = errors.strip().splitlines()
    for line in reversed(lines):
        if line.strip() and not line.startswith((" ", "Traceback (")):
            return line
    return lines[-1] if lines else ""


def _visible_folders() -> list[str]:
    """Return the folders that a program sees: Python, its packages, and the system's libraries.

    Raises:
        RunError: if one of them holds the user's home.
    """
    prefixes = (sys.base_prefix, sys.base_exec_prefix, sys.prefix, sys.exec_prefix)
    folders = [folder for folder in _SYSTEM_FOLDERS if Path(folder).is_dir()]
    for prefix in dict.fromkeys(os.path.realpath(prefix) for prefix in prefixes):
        if not any(Path(prefix).is_relative_to(folder) for folder in folders):
            folders.append(prefix)
    home = expand_user(Path("~")).resolve()
    for folder in folders:
        if home.is_relative_to(folder):
            raise RunError(
                f"generated programs would see the home folder {home}, because it is beside Python",
                where=folder,
                remedy="install Headwater in a virtual environment in another folder",
            )
    return folders
