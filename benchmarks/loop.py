"""Cost of streaming in a user's loop over a model that fits: `python -m benchmarks.loop --dtype bf16`.

The same loop runs over the same model (transformers' GPT-2), with and without `headwater.compile`. Plain
PyTorch runs twice: with malloc tuned as Headwater's, so that the ratio shows the cost of streaming alone, and
untuned. The streamed loop also runs twice, the second time with Headwater's attention kernel.
"""

from __future__ import annotations

import argparse
import sys

from benchmarks.options import end_on_sigterm
from benchmarks.runner import System, interleave, report
from benchmarks.workload import add_workload_arguments, workload_of

TUNED = System("plain PyTorch, allocator tuned", "torch_", ("--tuned",))
SYSTEMS = [
    TUNED,
    System("the same, headwater.compile", "torch_", ("--headwater",)),
    System("the same, use_fast_attention", "torch_", ("--headwater", "--fast_attention")),
    System("plain PyTorch", "torch_"),
]


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_workload_arguments(parser)
    parser.add_argument("--rounds", type=int, default=3)
    return parser


def main() -> int:
    args = make_parser().parse_args()
    results = interleave(SYSTEMS, workload_of(args), args.rounds, None)
    return report(f"loop_{args.dtype}", results, TUNED.name)


if __name__ == "__main__":
    end_on_sigterm()  # otherwise a run that it has started continues
    sys.exit(main())
