"""A model whose state is larger than its memory budget: `python -m benchmarks.large --folder /scratch`.

The 1.3B shape on the disk tier within 4 GiB is compared with the 111M shape at the same tokens per step. The
measure is the rate of the FLOPs that the model needs (recomputation not counted).
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from benchmarks.runner import System, print_table, run, save
from benchmarks.workload import Workload

SHAPES = {
    "111M": {"layers": 10, "width": 768, "heads": 12},
    "1.3B": {"layers": 24, "width": 2048, "heads": 16},
    "2.7B": {"layers": 32, "width": 2560, "heads": 32},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="folder of the disk tier")
    parser.add_argument("--memory", default="4GiB")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--shapes", default="111M,1.3B")
    args = parser.parse_args()
    base = Workload(batch=args.batch, sequence=args.sequence, steps=args.steps, warmup=1, rotate=2)
    rows = []
    for name in args.shapes.split(","):
        tier = "memory" if name == "111M" else "disk"
        system = System(name, "headwater_", (f"--tier={tier}", "--disk={disk}", f"--memory={args.memory}"))
        result = run(system, dataclasses.replace(base, **SHAPES[name]), args.folder)
        rate = result["flops_per_step"] / result["step_s"]
        rows.append(
            {
                "model": name,
                "tier": result["tier"],
                "activations": "+".join(result["activations"]),
                "micro_batch": result["micro_batch_size"],
                "step_s": round(result["step_s"], 2),
                "gflop_per_s": round(rate / 1e9, 1),
                "of_first": round(rate / (rows[0]["gflop_per_s"] * 1e9), 2) if rows else 1.0,
                "peak_rss_gib": round(result["peak_rss_bytes"] / 2**30, 2),
                "predicted_gib": round(result["prediction"]["host_bytes"] / 2**30, 2),
                "predicted_step_s": round(result["prediction"]["step_s"], 2),
                "losses": [round(result["first_loss"], 3), round(result["last_loss"], 3)],
            }
        )
        print_table(rows[-1:])
    print_table(rows)
    print(save("large", rows))


if __name__ == "__main__":
    main()
