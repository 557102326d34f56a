"""Predictions of plans compared with measured runs: `python -m benchmarks.plan_truth --folder /scratch`.

The rates of the machine are measured before each run, because on a shared machine they change within an hour.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import tempfile
from pathlib import Path
from typing import get_args

from benchmarks.options import end_on_sigterm
from benchmarks.runner import FailedRunError, Results, Row, System, is_part, print_table, rounded, run, save
from benchmarks.workload import Measured, Workload
from headwater.core.arithmetic import Matmul

MEMORY, DISK = ("--tier=memory",), ("--tier=disk", "--disk={disk}")
SMALL = Workload(layers=6, width=512, heads=8, vocab=8192, dtype="fp32")
MEDIUM = Workload(layers=24, width=1024, heads=16, batch=2, steps=3)

CASES = [
    ("12×768 bf16, memory", Workload(), MEMORY),
    ("12×768 bf16, disk", Workload(), DISK),
    ("12×768 fp32, memory", Workload(dtype="fp32", steps=3), MEMORY),
    ("12×768 bf16, recompute, 2 × 2", Workload(), (*MEMORY, "--activations=recompute", "--micro_batch=2")),
    ("6×512 fp32, disk, 2 slabs, gradients on disk", SMALL, (*DISK, "--slabs=2", "--gradient_tier=disk")),
    ("24×1024 bf16, disk", MEDIUM, DISK),
]


def _other(layers: int, width: int, heads: int, vocab: int, sequence: int, batch: int) -> Workload:
    return Workload(layers, width, heads, vocab, sequence, batch, steps=4)


_WIDE = _other(4, 1536, 12, 16000, 256, 8)
_DEEP = _other(32, 320, 5, 8000, 256, 8)
_LONG = _other(6, 512, 8, 32000, 2048, 2)
_HEAD = _other(4, 640, 10, 128000, 128, 8)

OTHERS = [
    ("4×1536 bf16, 8 × 256, memory", _WIDE, MEMORY),
    ("4×1536 fp32, 8 × 256, memory", dataclasses.replace(_WIDE, dtype="fp32"), MEMORY),
    ("4×1536 bf16, 8 × 256, disk, 3 slabs", _WIDE, (*DISK, "--slabs=3")),
    ("32×320 bf16, 8 × 256, memory, clipping", _DEEP, (*MEMORY, "--max_norm=1.0")),
    ("32×320 fp32, 8 × 256, disk", dataclasses.replace(_DEEP, dtype="fp32"), DISK),
    ("32×320 bf16, 8 × 256, memory, recompute", _DEEP, (*MEMORY, "--activations=recompute")),
    ("6×512 bf16, 2 × 2,048, memory", _LONG, MEMORY),
    ("6×512 bf16, 2 × 2,048, disk, micro-batch 1", _LONG, (*DISK, "--micro_batch=1")),
    ("6×512 fp32, 2 × 2,048, memory", dataclasses.replace(_LONG, dtype="fp32"), MEMORY),
    ("4×640 bf16, vocabulary 128,000, memory", _HEAD, MEMORY),
    ("4×640 bf16, vocabulary 128,000, disk, gradients on disk", _HEAD, (*DISK, "--gradient_tier=disk")),
    ("4×640 fp32, vocabulary 128,000, disk", dataclasses.replace(_HEAD, dtype="fp32"), DISK),
]
"""Shapes and settings that were not looked at when the predictions were made."""


LOOPS = [
    ("GPT-2 12×768 fp32, memory", Workload(dtype="fp32", steps=3), ("--headwater",)),
    ("GPT-2 6×512 fp32, memory", SMALL, ("--headwater",)),
    ("GPT-2 6×512 fp32, disk", SMALL, ("--headwater", "--disk={disk}")),
    ("GPT-2 6×512 bf16 under autocast, memory", dataclasses.replace(SMALL, dtype="bf16"), ("--headwater",)),
]
"""Your own loop over transformers' GPT-2, whose weights are in memory before they are streamed."""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="folder of the disk tiers")
    parser.add_argument("--others", action="store_true", help="twelve other shapes and settings")
    parser.add_argument("--loops", action="store_true", help="your own loop over a model of transformers")
    parser.add_argument("--only", default="", help="configurations whose name contains this")
    parser.add_argument("--matmul", choices=get_args(Matmul), default="auto", help="setting of the runs")
    return parser


def row_of(name: str, result: Measured) -> Row:
    """Return the row of a configuration."""
    plan = result["plan"]
    assert plan is not None, "Headwater has a plan"
    predicted_s = plan["predicted_step_s"]
    return {
        "configuration": name,
        "peak_gib": round(result["peak_rss_bytes"] / 2**30, 2),
        "predicted_gib": round(plan["predicted_host_bytes"] / 2**30, 2),
        "memory_ratio": round(plan["predicted_host_bytes"] / result["peak_rss_bytes"], 2),
        "step_s": round(result["step_s"], 2),
        "predicted_s": rounded(predicted_s),
        "time_ratio": rounded(predicted_s and predicted_s / result["step_s"]),
    }


def main() -> int:
    parser = make_parser()
    args = parser.parse_args()
    rows, results = [], Results()
    cases, saved = (OTHERS, "plan_truth_others") if args.others else (CASES, "plan_truth")
    if args.loops:
        cases, saved = LOOPS, "plan_truth_loops"
    for name, workload, options in cases:
        if args.only not in name:
            continue
        try:
            with tempfile.TemporaryDirectory() as cache:
                os.environ["XDG_CACHE_HOME"] = cache  # the process that is measured finds no rates there
                system = System(name, "headwater_", (*options, f"--matmul={args.matmul}"))
                if args.loops:
                    system = System(name, "torch_", options)
                rows.append(row_of(name, run(system, workload, args.folder)))
        except FailedRunError as error:
            results.fail(name, error)
        else:
            print_table(rows[-1:])
            sys.stdout.flush()  # the whole command takes minutes
    print_table([*rows, *results.failed_rows()])
    part = is_part(parser, args, "only", "matmul")
    print(save(saved, [*rows, *results.failed_rows()], part=part))
    return 1 if results.failures else 0


if __name__ == "__main__":
    end_on_sigterm()  # otherwise a run that it has started continues
    sys.exit(main())
