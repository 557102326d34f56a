"""A model whose state is larger than its memory budget: `python -m benchmarks.large --folder /scratch`.

The 1.3B shape on the disk tier within 4 GiB is compared with the 111M shape at the same tokens per step. The
measure is the rate of the FLOPs that the model needs (recomputation not counted).
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

from benchmarks.options import end_on_sigterm, names_of, positive, size
from benchmarks.runner import FailedRunError, Results, Row, System, is_part, print_table, rounded, run, save
from benchmarks.workload import Measured, Workload

SHAPES = {"111M": (10, 768, 12), "1.3B": (24, 2048, 16), "2.7B": (32, 2560, 32)}
"""Layers, width and heads, by the name of the shape."""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="folder of the disk tier")
    parser.add_argument("--memory", type=size, default="4GiB", help="budget of host memory (%(default)s)")
    parser.add_argument("--batch", type=positive, default=8)
    parser.add_argument("--sequence", type=positive, default=1024)
    parser.add_argument("--steps", type=positive, default=2, help="counted steps (%(default)s)")
    parser.add_argument(
        "--shapes",
        type=names_of(SHAPES),
        default=["111M", "1.3B"],
        help=f"names of {', '.join(SHAPES)}, separated by commas (111M,1.3B)",
    )
    return parser


def row_of(name: str, result: Measured, first: Measured | None) -> Row:
    """Return the row of a model; `first` is the result of the first one, `None` if it failed."""
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
        "of_first": "–" if first is None else round(rate / rate_of(first), 2),
        "peak_rss_gib": round(result["peak_rss_bytes"] / 2**30, 2),
        "predicted_gib": round(plan["predicted_host_bytes"] / 2**30, 2),
        "predicted_step_s": rounded(plan["predicted_step_s"]),
        "losses": [round(result["first_loss"], 3), round(result["last_loss"], 3)],
    }


def rate_of(result: Measured) -> float:
    """Return the FLOP/s of a run of Headwater."""
    assert result["plan"] is not None, "Headwater has a plan"
    return result["plan"]["flops_per_step"] / result["step_s"]


def main() -> int:
    parser = make_parser()
    args = parser.parse_args()
    base = Workload(batch=args.batch, sequence=args.sequence, steps=args.steps, warmup=1, rotate=2)
    rows: list[Row] = []
    results = Results()
    first: Measured | None = None
    for name in args.shapes:
        layers, width, heads = SHAPES[name]
        workload = dataclasses.replace(base, layers=layers, width=width, heads=heads)
        tier = "memory" if name == "111M" else "disk"
        system = System(name, "headwater_", (f"--tier={tier}", "--disk={disk}", f"--memory={args.memory}"))
        print(f"{name}: {args.steps + 1} steps of {base.tokens_per_step} tokens", flush=True)
        try:
            result = run(system, workload, args.folder)
        except FailedRunError as error:
            results.fail(name, error)
            continue
        first = result if name == args.shapes[0] else first
        rows.append(row_of(name, result, first))
        print_table(rows[-1:])
    rows += [{"model": name, "failed": reason} for name, reason in results.failures.items()]
    print_table(rows)
    part = is_part(parser, args, "batch", "sequence", "steps", "shapes")
    print(save("large", rows, part=part))
    return 1 if results.failures else 0


if __name__ == "__main__":
    end_on_sigterm()  # otherwise a run that it has started continues
    sys.exit(main())
