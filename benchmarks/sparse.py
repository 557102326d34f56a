"""Sparse training: time and memory of a step at several sparsities: `python -m benchmarks.sparse --rounds 3`.

Every run is `headwater fit` with a params file, in its own process, and all runs alternate. With `exact`
products, masked weights are multiplied as zeros. With `fast` ones they are left out. Memory is the resident
memory of the process at its peak.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from benchmarks.options import end_on_sigterm, fraction, positive
from benchmarks.ranks import Case, measure, ratio
from benchmarks.runner import Row, is_part, print_table, save
from benchmarks.workload import add_workload_arguments, workload_of


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_workload_arguments(parser)
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--sparsity", type=fraction, nargs="+", default=[0.75, 0.9])
    parser.add_argument("--disk", type=Path, help="a folder; the runs then use the disk tier there")
    parser.set_defaults(host_memory=None)
    return parser


def main() -> int:
    parser = make_parser()
    args = parser.parse_args()
    end_on_sigterm()
    workload, cores = workload_of(args), len(os.sched_getaffinity(0))
    if args.disk:
        args.disk.mkdir(parents=True, exist_ok=True)
    dense = "dense, exact"
    cases = {dense: Case(1, cores, workload.batch)}
    if workload.dtype != "fp32":
        cases["dense, fast"] = Case(1, cores, workload.batch, backend={"matmul": "fast"})
    for share in args.sparsity:
        for products in ("exact", "fast"):
            cases[f"sparsity {share:g}, {products}"] = Case(
                1, cores, workload.batch, backend={"matmul": products}, sparsity={"sparsity": share}
            )
    results, failures = measure(args, workload, cases)
    rows: list[Row] = [
        {
            "run": name,
            "tokens/s": [round(run["tokens_per_s"], 1) for run in runs],
            "of dense": ratio("tokens_per_s", runs, results[dense]),
            "memory of dense": ratio("peak_bytes", runs, results[dense]),
        }
        for name, runs in results.items()
    ]
    print_table(rows)
    failed: list[Row] = [{"case": name, "failed": reason} for name, reason in failures.items()]
    if failed:
        print_table(failed)
    name = f"sparse_{'disk' if args.disk else 'memory'}_{workload.dtype}"
    part = is_part(parser, args, "layers", "width", "vocab", "sequence", "batch", "sparsity")
    print(save(name, {"rows": rows, "runs": results, "failures": failures}, part=part))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
