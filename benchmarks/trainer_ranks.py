"""Hugging Face's Trainer with a rank for each core: `python -m benchmarks.trainer_ranks --rounds 2`.

The plain Trainer runs under `torchrun` and averages gradients with DistributedDataParallel, with and without
Headwater's settings of the allocator. `StreamedTrainer` streams the weights from memory, and from disk.
Memory is the resident memory of all processes of a run at its peak, with shared pages counted once.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TypedDict

from benchmarks.options import end_on_sigterm, positive
from benchmarks.ranks import end, watch
from benchmarks.runner import FailedRunError, Row, print_table, reason_of, save
from benchmarks.workload import Workload, add_workload_arguments, workload_of, workload_options

KINDS = {
    "plain": "Trainer, DistributedDataParallel",
    "tuned": "the same, allocator tuned",
    "memory": "StreamedTrainer, memory",
    "disk": "StreamedTrainer, disk",
}


class Found(TypedDict):
    """The measurements of one run."""

    tokens_per_s: float
    peak_bytes: int
    losses: list[float]


def run(kind: str, workload: Workload, ranks: int, disk: Path | None) -> Found:
    """Run once; return tokens per second, the peak of memory, and the losses.

    Raises:
        FailedRunError: if the run fails.
    """
    launcher = ["-m", "torch.distributed.run", f"--nproc_per_node={ranks}"]
    with tempfile.TemporaryDirectory(prefix="headwater-bench-", dir=disk) as name:
        command = [
            sys.executable,
            *(launcher if kind in ("plain", "tuned") else []),
            *("-m", "benchmarks.systems.trainer_ranks_", "--kind", kind, "--ranks", str(ranks)),
            *("--folder", name, *workload_options(workload)),
        ]
        with Path(name, "log").open("w") as log:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            [peak] = watch([process])
        finally:
            end([process])
        if process.returncode:
            printed = Path(name, "log").read_text()
            raise FailedRunError(KINDS[kind], printed[-3000:], reason_of(printed, process.returncode))
        found = json.loads(Path(name, "result.json").read_text())
    tokens_per_s = workload.tokens_per_step / statistics.median(found["times"])
    return {"tokens_per_s": tokens_per_s, "peak_bytes": peak, "losses": found["losses"]}


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_workload_arguments(parser)
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--disk", type=Path, help="a folder for the disk tier")
    return parser


def main() -> int:
    parser = make_parser()
    args = parser.parse_args()
    workload, ranks = workload_of(args), len(os.sched_getaffinity(0))
    if workload.batch % ranks:
        parser.error(f"--batch: expected a multiple of the {ranks} cores, found {workload.batch}")
    end_on_sigterm()
    if args.disk:
        args.disk.mkdir(parents=True, exist_ok=True)
    runs: dict[str, list[Found]] = {kind: [] for kind in KINDS}
    failures: dict[str, str] = {}
    for number in range(args.rounds):
        for kind in [kind for kind in KINDS if kind not in failures]:
            try:
                found = run(kind, workload, ranks, args.disk)
            except FailedRunError as error:
                print(error, file=sys.stderr, flush=True)
                failures[kind] = error.reason
                continue
            runs[kind].append(found)
            print(
                f"round {number + 1}/{args.rounds}  {KINDS[kind]:34s} {found['tokens_per_s']:8.1f} tokens/s  "
                f"{found['peak_bytes'] / 2**30:5.2f} GiB  loss {found['losses'][-1]:.4f}",
                flush=True,
            )
    compared = [] if "plain" in failures else [kind for kind in KINDS if kind not in failures]
    rows: list[Row] = [_row(kind, runs) for kind in compared]
    rows += [{"system": KINDS[kind], "failed": reason} for kind, reason in failures.items()]
    print_table(rows)
    print(save(f"trainer_ranks_{workload.dtype}", {"rows": rows, "runs": runs, "failures": failures}))
    return 1 if failures else 0


def _row(kind: str, runs: dict[str, list[Found]]) -> Row:
    """Return the medians of a system, and of its ratios to the plain Trainer in each round."""
    pairs = list(zip(runs[kind], runs["plain"], strict=True))
    speeds = [mine["tokens_per_s"] / plain["tokens_per_s"] for mine, plain in pairs]
    memory = [mine["peak_bytes"] / plain["peak_bytes"] for mine, plain in pairs]
    peaks = [mine["peak_bytes"] for mine, _ in pairs]
    return {
        "system": KINDS[kind],
        "tokens_per_s": round(statistics.median(mine["tokens_per_s"] for mine, _ in pairs), 1),
        "ratio": round(statistics.median(speeds), 2),
        "peak_gib": round(statistics.median(peaks) / 2**30, 2),
        "memory ratio": round(statistics.median(memory), 2),
        "equal losses": all(mine["losses"] == plain["losses"] for mine, plain in pairs),
    }


if __name__ == "__main__":
    sys.exit(main())
