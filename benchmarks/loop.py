"""Cost of streaming in a user's loop over a model that fits: `python -m benchmarks.loop --dtype bf16`.

The same loop runs over the same model (transformers' GPT-2), with and without `headwater.compile`. Plain
PyTorch runs twice: with malloc tuned as Headwater's, so that the ratio shows the cost of streaming alone, and
untuned. The streamed loop also runs twice, the second time with Headwater's attention kernel.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys

from benchmarks.options import end_on_sigterm
from benchmarks.padding import add_padding_argument
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
    add_padding_argument(parser)
    parser.add_argument("--rounds", type=int, default=3)
    return parser


def main() -> int:
    args = make_parser().parse_args()
    padding = ("--padding", str(args.padding)) if args.padding else ()
    systems = [dataclasses.replace(each, options=(*each.options, *padding)) for each in SYSTEMS]
    results = interleave(systems, workload_of(args), args.rounds, None)
    return report(f"loop_{args.dtype}" + "_padded" * bool(padding), results, TUNED.name)


if __name__ == "__main__":
    end_on_sigterm()  # otherwise a run that it has started continues
    sys.exit(main())
