"""A model whose state is larger than its memory budget: `python -m benchmarks.large --folder /scratch`.

The 1.3B shape on the disk tier within 4 GiB is compared with the 111M shape at the same tokens per step. The
measure is the rate of the FLOPs that the model needs (recomputation not counted).
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from benchmarks.runner import Row, System, print_table, rounded, run, save
from benchmarks.workload import Measured, Workload

SHAPES = {"111M": (10, 768, 12), "1.3B": (24, 2048, 16), "2.7B": (32, 2560, 32)}
"""Layers, width and heads, by the name of the shape."""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="folder of the disk tier")
    parser.add_argument("--memory", default="4GiB")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--shapes", default="111M,1.3B", help=f"names of {', '.join(SHAPES)} (%(default)s)")
    return parser


def row_of(name: str, result: Measured, first: Measured) -> Row:
    """Return the row of a model; `first` is the result of the first one."""
    plan = result["plan"]
    assert plan is not None, "Headwater has a plan"
    rate = rate_of(result)
    return {
        "model": name,
        "tier": plan["tier"],
        "activations": "+".join(plan["activations"]),
        "micro_batch": plan["micro_batch_size"],
        "step_s": round(result["step_s"], 2),
        "gflop_per_s": round(rate / 1e9, 1),
        "of_first": round(rate / rate_of(first), 2),
        "peak_rss_gib": round(result["peak_rss_bytes"] / 2**30, 2),
        "predicted_gib": round(plan["predicted_host_bytes"] / 2**30, 2),
        "predicted_step_s": rounded(plan["predicted_step_s"]),
        "losses": [round(result["first_loss"], 3), round(result["last_loss"], 3)],
    }


def rate_of(result: Measured) -> float:
    """Return the FLOP/s of a run of Headwater."""
    assert result["plan"] is not None, "Headwater has a plan"
    return result["plan"]["flops_per_step"] / result["step_s"]


def main() -> None:
    args = make_parser().parse_args()
    base = Workload(batch=args.batch, sequence=args.sequence, steps=args.steps, warmup=1, rotate=2)
    rows: list[Row] = []
    first: Measured | None = None
    for name in args.shapes.split(","):
        layers, width, heads = SHAPES[name]
        workload = dataclasses.replace(base, layers=layers, width=width, heads=heads)
        tier = "memory" if name == "111M" else "disk"
        system = System(name, "headwater_", (f"--tier={tier}", "--disk={disk}", f"--memory={args.memory}"))
        result = run(system, workload, args.folder)
        first = first or result
        rows.append(row_of(name, result, first))
        print_table(rows[-1:])
    print_table(rows)
    print(save("large", rows))


if __name__ == "__main__":
    main()
