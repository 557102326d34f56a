"""Cost of streaming in a user's loop over a model that fits: `python -m benchmarks.loop --dtype bf16`.

The same loop runs over the same model (transformers' GPT-2), with and without `headwater.compile`. Plain
PyTorch runs twice: with malloc tuned as Headwater's, so that the ratio shows the cost of streaming alone, and
untuned.
"""

from __future__ import annotations

import argparse
import statistics

from benchmarks.runner import System, interleave, print_table, save, table
from benchmarks.workload import add_workload_arguments, workload_of

TUNED = System("plain PyTorch, allocator tuned", "torch_", ("--tuned",))
SYSTEMS = [
    TUNED,
    System("the same, headwater.compile", "torch_", ("--headwater",)),
    System("plain PyTorch", "torch_"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_workload_arguments(parser)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    results = interleave(SYSTEMS, workload_of(args), args.rounds, None)
    rows = table(results, TUNED.name)
    for row in rows:
        firsts = [run["first_step_s"] for run in results[row["system"]]]
        row["first_step_s"] = round(statistics.median(firsts), 1)
    print_table(rows)
    print(save(f"loop_{args.dtype}", {"rows": rows, "runs": results}))


if __name__ == "__main__":
    main()
