"""Comparison of systems: interleaved rounds, one process per run, medians of ratios, JSON."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import platform
import re
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.workload import Measured, Workload, workload_options

RESULTS = Path(__file__).parent / "results"

Row = dict[str, object]
"""A row of a table: cells by column."""

_PACKAGES = {"deepspeed_": "deepspeed", "trainer_": "accelerate"}
"""The package beside Headwater's own that a module of `benchmarks.systems` needs."""


@dataclasses.dataclass(frozen=True)
class System:
    """A way to train the workload.

    Attributes:
        name: the row of the table.
        module: the module to run.
        options: options in addition to those of the workload; `{disk}` is replaced by a folder for the run.
        limit_s: a run that takes longer is ended, and fails.
    """

    name: str
    module: str
    options: tuple[str, ...] = ()
    limit_s: float | None = None

    @property
    def missing(self) -> str | None:
        """The package that the system needs and that is not installed, if there is one."""
        package = _PACKAGES.get(self.module)
        return None if package is None or importlib.util.find_spec(package) else package


class FailedRunError(RuntimeError):
    """A run of a system failed.

    Attributes:
        reason: the error of the run, in one line.
    """

    def __init__(self, system: str, output: str, reason: str) -> None:
        super().__init__(f"{system} failed: {reason}\n{output}")
        self.reason = reason


def run(system: System, workload: Workload, disk: Path | None = None) -> Measured:
    """Run once in a separate process and return its measurements.

    Raises:
        FailedRunError: if it failed; with the end of its output.
    """
    if disk is not None:
        disk.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="headwater-bench-", dir=disk))
    options = [option.format(disk=folder) for option in system.options]
    command = [
        sys.executable,
        "-m",
        f"benchmarks.systems.{system.module}",
        *workload_options(workload),
        *options,
    ]
    root = Path(__file__).parent.parent
    environment = {
        **os.environ,
        "PYTHONPATH": f"{root}{os.pathsep}{root / 'src'}",
        "TOKENIZERS_PARALLELISM": "false",
    }
    try:
        with subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
            env=environment,
            start_new_session=True,
        ) as process:
            # A run that needs more gets an error, instead of a kernel that ends other processes too.
            resource.prlimit(process.pid, resource.RLIMIT_DATA, (limit := most_memory(), limit))
            stdout, stderr = _output_of(process, system)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    lines = [line for line in stdout.splitlines() if line.startswith("RESULT ")]
    if process.returncode or not lines:
        output = f"{stdout[-2000:]}\n{stderr[-3000:]}"
        raise FailedRunError(system.name, output, reason_of(stderr, process.returncode))
    result: Measured = json.loads(lines[-1].removeprefix("RESULT "))
    return result


def _output_of(process: subprocess.Popen[str], system: System) -> tuple[str, str]:
    """Return what a run prints until it ends. End the run, with its own processes, after its limit.

    Raises:
        FailedRunError: if the run takes longer.
    """
    try:
        return process.communicate(timeout=system.limit_s)
    except BaseException as error:
        # A compiler that the run has started would continue, and keep the pipes open.
        os.killpg(process.pid, signal.SIGKILL)
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        stdout, stderr = process.communicate()
        last = (stderr.strip().splitlines() or ["it printed no error"])[-1]
        reason = f"no result within {system.limit_s:.0f} s; its last line: {last}"
        raise FailedRunError(system.name, f"{stdout[-2000:]}\n{stderr[-3000:]}", reason) from None


def most_memory() -> int:
    """Return nine tenths of the machine's memory, in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * 9 // 10


def reason_of(stderr: str, code: int) -> str:
    """Return the last error that a process printed, else its last line, with the exit code."""
    errors = re.findall(r"^(?:\[rank\d+\]: )?([\w.]*(?:Error|Exception)\b.*)", stderr, re.MULTILINE)
    found = errors or stderr.strip().splitlines() or ["it printed no error"]
    return f"{found[-1]} (exit code {code})"


@dataclasses.dataclass
class Results:
    """The measurements of several systems.

    Attributes:
        runs: the measurements of every round, by system.
        failures: the reason, by system that failed; its runs are left out.
        left_out: the reason, by system that was not run because a package is missing.
    """

    runs: dict[str, list[Measured]] = dataclasses.field(default_factory=dict)
    failures: dict[str, str] = dataclasses.field(default_factory=dict)
    left_out: dict[str, str] = dataclasses.field(default_factory=dict)

    def present(self, systems: Sequence[System]) -> list[System]:
        """Return the systems that can run. Record and print the reason for each of the others."""
        for system in systems:
            if system.missing:
                self.left_out[system.name] = f"not run: pip install {system.missing}"
                print(f"{system.name:34s} {self.left_out[system.name]}", flush=True)
        return [system for system in systems if not system.missing]

    def fail(self, system: str, error: FailedRunError) -> None:
        """Record a failure of a system and print it."""
        print(error, file=sys.stderr, flush=True)
        self.runs.pop(system, None)
        self.failures[system] = error.reason

    def failed_rows(self) -> list[Row]:
        """Return a row with the reason for each system that failed or was not run."""
        reasons = {**self.failures, **self.left_out}
        return [{"system": system, "failed": reason} for system, reason in reasons.items()]


def interleave(systems: Sequence[System], workload: Workload, rounds: int, disk: Path | None) -> Results:
    """Run every system once per round. A system that fails is left out of later rounds."""
    results = Results()
    present = results.present(systems)
    for number in range(rounds):
        for system in present:
            if system.name in results.failures:
                continue
            try:
                result = run(system, workload, disk)
            except FailedRunError as error:
                results.fail(system.name, error)
                continue
            results.runs.setdefault(system.name, []).append(result)
            print(
                f"round {number + 1}/{rounds}  {system.name:34s} {result['tokens_per_s']:8.1f} tokens/s  "
                f"{result['peak_rss_bytes'] / 2**30:5.2f} GiB  loss {result['last_loss']:.4f}",
                flush=True,
            )
    return results


def table(runs: Mapping[str, Sequence[Measured]], base: str) -> list[Row]:
    """Return a row per system: medians, and the median over rounds of its speed divided by that of `base`."""
    return [_medians(name, measured, runs.get(base, [])) for name, measured in runs.items()]


def _medians(name: str, runs: Sequence[Measured], base: Sequence[Measured]) -> Row:
    speeds = [run["tokens_per_s"] for run in runs]
    # The base is empty if it failed.
    pairs = zip(speeds, base, strict=True) if base else ()
    ratios = [speed / other["tokens_per_s"] for speed, other in pairs]
    return {
        "system": name,
        "tokens_per_s": round(statistics.median(speeds), 1),
        "ratio": round(statistics.median(ratios), 2) if ratios else "–",
        "peak_rss_gib": round(statistics.median(run["peak_rss_bytes"] for run in runs) / 2**30, 2),
        "first_step_s": round(statistics.median(run["first_step_s"] for run in runs), 1),
        "last_loss": round(runs[-1]["last_loss"], 4),
    }


def report(name: str, results: Results, base: str, *, part: bool = False) -> int:
    """Print and save the table of some systems; return the exit code: 1 if a system failed.

    Args:
        name: name of the results.
        results: the measurements.
        base: the system with which the others are compared.
        part: see `save`.
    """
    rows = table(results.runs, base)
    print_table([*rows, *results.failed_rows()])
    print(save(name, {"rows": rows, **dataclasses.asdict(results)}, part=part))
    return 1 if results.failures else 0


def is_part(parser: argparse.ArgumentParser, args: argparse.Namespace, *options: str) -> bool:
    """True if one of these options does not have its default: the run is not a whole one."""
    return any(getattr(args, option) != parser.get_default(option) for option in options)


def save(name: str, content: object, *, part: bool = False) -> Path:
    """Write `results/<name>.json` with a description of the machine.

    Args:
        name: name of the results.
        content: the results.
        part: they are those of a smaller run. They go to `results/<name>_part.json`, so that the results of
            the last whole run are kept.

    Returns:
        The path of the file.
    """
    import torch

    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}{'_part' if part else ''}.json"
    if part:
        print(f"not a whole run: {name}.json is left as it is")
    machine = {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    path.write_text(json.dumps({"machine": machine, "results": content}, indent=1) + "\n")
    return path


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def rounded(seconds: float | None) -> float | str:
    """Return a predicted time for a table; empty if the machine was too busy to be measured in time."""
    return "" if seconds is None else round(seconds, 2)


def print_table(rows: Sequence[Row]) -> None:
    """Print a table in Markdown, with every column that a row has. A file gets it at once, too."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    print("| " + " | ".join(keys) + " |\n|" + "---|" * len(keys))
    for row in rows:
        print("| " + " | ".join(str(row.get(key, "")) for key in keys) + " |")
    sys.stdout.flush()
