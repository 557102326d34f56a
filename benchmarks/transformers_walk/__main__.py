"""Streamed training of every class of the transformers library: `python -m benchmarks.transformers_walk`."""

from __future__ import annotations

import argparse
import logging
import time
import warnings
from pathlib import Path

import torch
import transformers

from benchmarks.options import end_on_sigterm, matching, positive, require_place
from benchmarks.runner import save
from benchmarks.transformers_walk.catalogue import Entry, entries
from benchmarks.transformers_walk.pool import ChildError, run_isolated
from benchmarks.transformers_walk.table import page
from benchmarks.transformers_walk.walk import Outcome, walk


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="classes (default: all)")
    parser.add_argument("--workers", type=positive, default=2, help="processes at once (%(default)s)")
    parser.add_argument("--limit", type=positive, default=60, help="CPU seconds for a class (%(default)s)")
    parser.add_argument("--every", type=positive, default=1, help="walk only every N-th class")
    parser.add_argument("--page", type=Path, help="Markdown file for the table")
    return parser


def main() -> None:
    parser = make_parser()
    args = parser.parse_args()
    known = [entry.class_name for entry in entries()]
    if args.names:
        matching(parser, "names", args.names, known)
    for name in args.names:
        if name not in known:
            parser.error(f"names: {name!r} is only a part of names; write the name of a class")
    if args.page:
        require_place(parser, "--page", args.page)
    end_on_sigterm()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    logging.getLogger("torch").setLevel(logging.CRITICAL)
    chosen = [entry for entry in entries() if not args.names or entry.class_name in args.names][:: args.every]
    results = run_isolated(walk, chosen, workers=args.workers, limit_s=args.limit)
    outcomes: list[Outcome] = []
    start = time.monotonic()
    for entry, result in zip(chosen, results, strict=True):
        place = f"{len(outcomes) + 1}/{len(chosen)}  {time.monotonic() - start:5.0f} s"
        outcomes.append(_shown(entry, result, place))
    built, equal = sum(each.built for each in outcomes), sum(bool(each.equal) for each in outcomes)
    print(f"{len(outcomes)} classes, {built} built, {equal} equal")
    rows = [_row(outcome) for outcome in outcomes]
    if not args.names and args.every == 1:
        print(save("transformers_walk", {"transformers": transformers.__version__, "classes": rows}))
    if args.page:
        args.page.write_text(page(outcomes))


def _shown(entry: Entry, result: Outcome | ChildError, place: str) -> Outcome:
    """Return the outcome of a class and print it as a line, after its place in the list."""
    if isinstance(result, ChildError):
        result = Outcome(entry, built=False, equal=None, reason=str(result))
    verdict = "equal" if result.equal else "differs" if result.built else "not built"
    name, task = f"{entry.class_name:50s}", f"{entry.tasks[0]:20s}"
    print(place, name, task, verdict, f"{result.seconds:.1f} s", result.reason, flush=True)
    return result


def _row(outcome: Outcome) -> dict[str, object]:
    return {
        "class": outcome.entry.class_name,
        "task": outcome.entry.tasks[0],
        "built": outcome.built,
        "equal": outcome.equal,
        "reason": outcome.reason,
        "parameters": outcome.numel,
        "stages": outcome.stages,
        "slabs": outcome.slabs,
    }


if __name__ == "__main__":
    main()
