"""Predictions of plans compared with measured runs: `python -m benchmarks.plan_truth --folder /scratch`."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.runner import System, print_table, run, save
from benchmarks.workload import Workload

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="folder of the disk tiers")
    args = parser.parse_args()
    rows = []
    for name, workload, options in CASES:
        result = run(System(name, "headwater_", options), workload, args.folder)
        prediction = result["prediction"]
        rows.append(
            {
                "configuration": name,
                "peak_gib": round(result["peak_rss_bytes"] / 2**30, 2),
                "predicted_gib": round(prediction["host_bytes"] / 2**30, 2),
                "memory_ratio": round(prediction["host_bytes"] / result["peak_rss_bytes"], 2),
                "step_s": round(result["step_s"], 2),
                "predicted_s": round(prediction["step_s"], 2),
                "time_ratio": round(prediction["step_s"] / result["step_s"], 2),
            }
        )
        print_table(rows[-1:])
    print_table(rows)
    print(save("plan_truth", rows))


if __name__ == "__main__":
    main()
