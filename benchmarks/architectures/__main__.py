"""Comparison of these architectures with plain PyTorch: `python -m benchmarks.architectures`."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import warnings
from pathlib import Path

import torch
import torch._dynamo
import torch.fx.experimental.symbolic_shapes  # first, so that forked children share the imports of a dry run

from benchmarks.architectures import others, sequence, vision  # noqa: F401 they fill the list
from benchmarks.architectures.catalogue import ARCHITECTURES
from benchmarks.architectures.compare import Row, compare
from benchmarks.architectures.page import page
from benchmarks.runner import save
from benchmarks.transformers_walk.pool import ChildError, run_isolated
from headwater.conform.plans import PLANS


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="parts of names (default: all architectures)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--limit", type=float, default=600, help="seconds for an architecture")
    parser.add_argument("--plans", default=",".join(PLANS), help="plans to compare under")
    parser.add_argument("--page", type=Path, help="Markdown file for the table")
    return parser


def main() -> None:
    args = make_parser().parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    chosen = [
        each for each in ARCHITECTURES if not args.words or any(word in each.name for word in args.words)
    ]
    plans = args.plans.split(",")
    one = functools.partial(compare, plans=plans)
    rows = []
    for each, result in zip(
        chosen, run_isolated(one, chosen, workers=args.workers, limit_s=args.limit), strict=True
    ):
        if isinstance(result, ChildError):
            result = Row(each.name, each.family, 0, {"plain": "crashed"}, {"plain": str(result)})
        print(f"{each.name:50} {'equal' if result.equal else result.reasons}", flush=True)
        rows.append(result)
    print(f"{len(rows)} architectures, {sum(row.equal for row in rows)} equal under every plan")
    if not args.words:
        print(save("architectures", {"architectures": [dataclasses.asdict(row) for row in rows]}))
    if args.page:
        args.page.write_text(page(rows, plans))


if __name__ == "__main__":
    main()
