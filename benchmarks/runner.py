"""Comparison of systems: interleaved rounds, one process per run, medians of ratios, JSON."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.workload import Workload, workload_options

RESULTS = Path(__file__).parent / "results"


@dataclasses.dataclass(frozen=True)
class System:
    """A way to train the workload.

    Attributes:
        name: the row of the table.
        module: the module to run.
        options: options in addition to those of the workload; `{disk}` is replaced by a folder for the run.
    """

    name: str
    module: str
    options: tuple[str, ...] = ()

    @property
    def available(self) -> bool:
        return self.module != "deepspeed_" or importlib.util.find_spec("deepspeed") is not None


def run(system: System, workload: Workload, disk: Path | None = None) -> dict[str, object]:
    """Run once in a separate process and return its measurements.

    Raises:
        RuntimeError: if it failed; with the end of its output.
    """
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
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        raise RuntimeError(f"{system.name} failed:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
    result: dict[str, object] = json.loads(lines[-1].removeprefix("RESULT "))
    return result


def interleave(
    systems: list[System], workload: Workload, rounds: int, disk: Path | None
) -> dict[str, list[dict[str, object]]]:
    """Run every system once per round, and return the measurements by system."""
    results: dict[str, list[dict[str, object]]] = {system.name: [] for system in systems if system.available}
    for number in range(rounds):
        for system in systems:
            if not system.available:
                continue
            result = run(system, workload, disk)
            results[system.name].append(result)
            print(
                f"round {number + 1}/{rounds}  {system.name:34s} {result['tokens_per_s']:8.1f} tokens/s  "
                f"{result['peak_rss_bytes'] / 2**30:5.2f} GiB  loss {result['last_loss']:.4f}",
                flush=True,
            )
    return results


def table(results: dict[str, list[dict[str, object]]], base: str) -> list[dict[str, object]]:
    """Return a row per system: medians, and the median over rounds of its speed divided by that of `base`."""
    rows = []
    for name, runs in results.items():
        ratios = [
            run["tokens_per_s"] / reference["tokens_per_s"]
            for run, reference in zip(runs, results[base], strict=True)
        ]
        rows.append(
            {
                "system": name,
                "tokens_per_s": round(statistics.median(run["tokens_per_s"] for run in runs), 1),
                "ratio": round(statistics.median(ratios), 2),
                "peak_rss_gib": round(statistics.median(run["peak_rss_bytes"] for run in runs) / 2**30, 2),
                "last_loss": round(runs[-1]["last_loss"], 4),
            }
        )
    return rows


def save(name: str, content: object) -> Path:
    """Write `results/<name>.json` with a description of the machine."""
    import torch

    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
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


def print_table(rows: list[dict[str, object]]) -> None:
    """Print a table in Markdown."""
    keys = list(rows[0])
    print("| " + " | ".join(keys) + " |\n|" + "---|" * len(keys))
    for row in rows:
        print("| " + " | ".join(str(row[key]) for key in keys) + " |")
