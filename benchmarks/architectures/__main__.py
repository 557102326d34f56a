"""Comparison of these architectures with plain PyTorch: `python -m benchmarks.architectures`."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
import time
import warnings
from pathlib import Path

import torch
import torch._dynamo
import torch.fx.experimental.symbolic_shapes  # first, so that forked children share the imports of a dry run

from benchmarks.architectures import others, sequence, vision  # noqa: F401 they fill the list
from benchmarks.architectures.catalogue import ARCHITECTURES
from benchmarks.architectures.compare import Row, compare
from benchmarks.architectures.page import page
from benchmarks.options import end_on_sigterm, matching, names_of, positive, require_place
from benchmarks.runner import save
from benchmarks.transformers_walk.pool import ChildError, run_isolated
from headwater.conform.plans import PLANS


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="parts of names (default: all architectures)")
    parser.add_argument("--workers", type=positive, default=2, help="processes at once (%(default)s)")
    parser.add_argument(
        "--limit", type=positive, default=600, help="CPU seconds for an architecture (%(default)s)"
    )
    parser.add_argument(
        "--plans", type=names_of(PLANS), default=list(PLANS), help=f"plans: {','.join(PLANS)} (all)"
    )
    parser.add_argument("--page", type=Path, help="Markdown file for the table")
    return parser


def main() -> int:
    parser = make_parser()
    args = parser.parse_args()
    names = matching(parser, "words", args.words or [""], [each.name for each in ARCHITECTURES])
    if args.page:
        require_place(parser, "--page", args.page)
    end_on_sigterm()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    chosen = [each for each in ARCHITECTURES if each.name in names]
    one = functools.partial(compare, plans=args.plans)
    start = time.monotonic()
    rows = []
    for each, result in zip(
        chosen, run_isolated(one, chosen, workers=args.workers, limit_s=args.limit), strict=True
    ):
        if isinstance(result, ChildError):
            result = Row(each.name, each.family, 0, {"plain": "crashed"}, {"plain": str(result)})
        rows.append(result)
        place = f"{len(rows)}/{len(chosen)}  {time.monotonic() - start:5.0f} s"
        print(f"{place}  {each.name:50} {'equal' if result.equal else result.reasons}", flush=True)
    print(f"{len(rows)} architectures, {sum(row.equal for row in rows)} equal under every plan")
    if not args.words:
        print(save("architectures", {"architectures": [dataclasses.asdict(row) for row in rows]}))
    if args.page:
        args.page.write_text(page(rows, args.plans))
    return 0 if all(row.equal for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
