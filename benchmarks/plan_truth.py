"""Predictions of plans compared with measured runs: `python -m benchmarks.plan_truth --folder /scratch`."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.runner import Row, System, print_table, run, save
from benchmarks.workload import Measured, Workload

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


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="folder of the disk tiers")
    parser.add_argument("--only", default="", help="configurations whose name contains this")
    return parser


def row_of(name: str, result: Measured) -> Row:
    """Return the row of a configuration."""
    plan = result["plan"]
    assert plan is not None, "Headwater has a plan"
    return {
        "configuration": name,
        "peak_gib": round(result["peak_rss_bytes"] / 2**30, 2),
        "predicted_gib": round(plan["predicted_host_bytes"] / 2**30, 2),
        "memory_ratio": round(plan["predicted_host_bytes"] / result["peak_rss_bytes"], 2),
        "step_s": round(result["step_s"], 2),
        "predicted_s": round(plan["predicted_step_s"], 2),
        "time_ratio": round(plan["predicted_step_s"] / result["step_s"], 2),
    }


def main() -> None:
    args = make_parser().parse_args()
    rows = []
    for name, workload, options in CASES:
        if args.only not in name:
            continue
        rows.append(row_of(name, run(System(name, "headwater_", options), workload, args.folder)))
        print_table(rows[-1:])
    print_table(rows)
    print(save("plan_truth", rows))


if __name__ == "__main__":
    main()
