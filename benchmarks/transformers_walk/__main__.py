"""Streams every class of the transformers library: `python -m benchmarks.transformers_walk`."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import logging
import warnings
from pathlib import Path

import torch
import transformers

from benchmarks.transformers_walk.catalogue import entries
from benchmarks.transformers_walk.pool import ChildError, run_isolated
from benchmarks.transformers_walk.walk import Outcome, walk


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="classes; all if none is given")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--limit", type=float, default=60, help="seconds for a class")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--out")
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    logging.getLogger("torch").setLevel(logging.CRITICAL)
    chosen = [entry for entry in entries() if not args.names or entry.class_name in args.names][:: args.every]
    out = []
    for entry, outcome in zip(
        chosen, run_isolated(walk, chosen, workers=args.workers, limit_s=args.limit), strict=True
    ):
        if isinstance(outcome, ChildError):
            outcome = Outcome(entry, built=False, equal=None, reason=str(outcome))
        verdict = "equal" if outcome.equal else "differs" if outcome.built else "not built"
        print(
            f"{entry.class_name:50s} {entry.tasks[0]:20s} {verdict} {outcome.seconds:.1f} s {outcome.reason}"
        )
        out.append(dataclasses.asdict(outcome))
        if args.out:
            Path(args.out).write_text(json.dumps(out, indent=0))
    print(len(out), collections.Counter((o["built"], o["equal"]) for o in out))


if __name__ == "__main__":
    main()
