"""Runs in small budgets and small control groups: `python -m benchmarks.budgets --folder /scratch`.

Every run trains, evaluates and writes checkpoints. Its peak is the number that the kernel counted: the
resident memory of the process, or the memory of the control group. Control groups need root and cgroup v1 or
v2.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import os
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.runner import is_part, print_table, save
from headwater.core.units import MIB, parse_bytes
from headwater.data.assets import sample_text

PARAMS = """\
extends: gpt/tiny
trainer:
  init:
    model: {{vocab_size: 1024}}
    loop: {{max_steps: 4, eval_frequency: 2, eval_steps: 2}}
    checkpoint: {{steps: 2}}
  fit:
    train_dataloader: {{data_dir: {data}/train, batch_size: 64, num_workers: {workers}}}
    val_dataloader: {{data_dir: {data}/val, batch_size: 64, num_workers: {workers}}}
"""
SMALLEST = re.compile(r"set host_memory ([\d.]+ [KMG]iB)")
NEEDED = re.compile(r"of host memory where ([\d.]+ [KMG]iB) are needed")
PREDICTED = re.compile(r"^host +([\d.]+ [KMG]iB)", re.MULTILINE)
LIMIT_FILES = {
    "memory.limit_in_bytes": ("memory.max_usage_in_bytes", "total_rss"),
    "memory.max": ("memory.peak", "anon"),
}


@dataclasses.dataclass(frozen=True)
class Ended:
    """The result of a command.

    Attributes:
        code: its exit status, negative for a signal.
        text: its output.
        peak: peak of resident memory of the process, in bytes.
    """

    code: int
    text: str
    peak: int

    @property
    def outcome(self) -> str:
        """Return the result in one word."""
        if self.code in (-9, 137):
            return "killed"
        if "does not fit" in self.text:
            return "refused"
        return {0: "trained", 130: "stopped"}.get(self.code, f"failed ({self.code})")


def headwater(words: list[str], folder: Path, *, group: Path | None = None) -> Ended:
    """Run a command line, in a control group if one is given."""

    def enter() -> None:
        if group is not None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

    with (folder / "output.txt").open("w+") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "headwater", *words], stdout=output, stderr=subprocess.STDOUT,
            preexec_fn=enter,
        )  # fmt: skip
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        return Ended(process.returncode, output.read(), usage.ru_maxrss * 1024)


@contextmanager
def control_group(limit: int) -> Iterator[Path]:
    """Create a control group with a limit of `limit` bytes, below a group whose memory can be limited."""
    roots = [Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")]
    root = next(root for root in roots if (root / "cgroup.procs").exists())
    group = root / f"headwater-budgets-{uuid.uuid4().hex[:8]}"
    group.mkdir()
    try:
        name = next(name for name in LIMIT_FILES if (group / name).exists())
        (group / name).write_text(str(limit))
        swap = group / "memory.memsw.limit_in_bytes"
        if swap.exists():
            swap.write_text(str(limit))
        yield group
    finally:
        while (group / "cgroup.procs").read_text().strip():
            time.sleep(0.1)
        group.rmdir()


def group_peak(group: Path) -> int:
    """Return the peak of bytes that a control group was charged for, cached files included."""
    names = (peak for peak, _ in LIMIT_FILES.values())
    return int(next(group / name for name in names if (group / name).exists()).read_text())


def in_budget(params: Path, budget: int, disk: bool, folder: Path) -> dict[str, Any]:
    """Train within `--host_memory`."""
    words = [*fit_words(params, folder, disk), f"--host_memory={budget}"]
    ended = headwater(words, folder)
    predicted = PREDICTED.search(ended.text)
    return {
        "limit": "budget",
        "disk": disk,
        "limit_mib": budget // MIB,
        "predicted_mib": round(parse_bytes(predicted[1]) / MIB) if predicted else None,
        "peak_mib": round(ended.peak / MIB),
        "ratio": round(ended.peak / budget, 3),
        "outcome": ended.outcome,
    }


def in_group(params: Path, limit: int, disk: bool, folder: Path) -> dict[str, Any]:
    """Train in a control group, without memory options."""
    with control_group(limit) as group:
        ended = headwater(fit_words(params, folder, disk), folder, group=group)
        peak = group_peak(group)
    predicted = PREDICTED.search(ended.text)
    return {
        "limit": "group",
        "disk": disk,
        "limit_mib": limit // MIB,
        "predicted_mib": round(parse_bytes(predicted[1]) / MIB) if predicted else None,
        "peak_mib": round(peak / MIB),
        "ratio": round(peak / limit, 3),
        "outcome": ended.outcome,
    }


def fit_words(params: Path, folder: Path, disk: bool) -> list[str]:
    """Return the command line of a new run."""
    words = ["fit", str(params), f"--model_dir={folder / 'runs' / uuid.uuid4().hex[:8]}"]
    return [*words, f"--disk={folder / 'disk'}"] if disk else words


def smallest(params: Path, disk: bool, folder: Path) -> int:
    """Return the budget that the refusal of a budget of 1 MiB names."""
    refusal = headwater([*fit_words(params, folder, disk), "--host_memory=1MiB"], folder).text
    found = SMALLEST.search(refusal)
    if found is None:
        raise SystemExit(f"no remedy in: {refusal}")
    return parse_bytes(found[1])


def prepare(folder: Path, workers: int) -> Path:
    """Write data and a params file."""
    data, text = folder / "data", folder / "text.txt"
    if not data.exists():
        text.write_text(gzip.decompress(sample_text().read_bytes()).decode())
        words = ["data", str(text), "--out", str(data), "--vocab_size=1024", "--sequence_length=128"]
        ended = headwater(words, folder)
        if ended.code:
            raise SystemExit(ended.text)
    params = folder / "budgets.yaml"
    params.write_text(PARAMS.format(data=data, workers=workers))
    return params


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="folder for data, runs and the disk tier")
    parser.add_argument("--count", type=int, default=30, help="budgets of each kind")
    parser.add_argument("--factor", type=float, default=1.04, help="ratio of a budget to the one before")
    parser.add_argument("--workers", type=int, default=0, help="data workers of each data set")
    parser.add_argument("--kinds", default="budget,group", help="budget, group, or both")
    return parser


def main() -> None:
    parser = make_parser()
    args = parser.parse_args()
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    params = prepare(folder, args.workers)
    rows: list[dict[str, Any]] = []
    for disk in (False, True):
        first = smallest(params, disk, folder)
        for kind in args.kinds.split(","):
            for index in range(args.count // 2):
                if kind == "budget":
                    rows.append(in_budget(params, int(first * args.factor**index), disk, folder))
                else:  # the first groups are too small, and must be refused
                    rows.append(in_group(params, int(0.9 * first * args.factor**index), disk, folder))
                print_table(rows[-1:])
    print_table(rows)
    part = is_part(parser, args, "count", "kinds")
    print(save("budgets", rows, part=part))


if __name__ == "__main__":
    main()
