"""One part of the measurements on a GPU: `python -m benchmarks.gpu --part c --out /tmp/results`.

a: tests against plain PyTorch; b: rates of the machine; c: 1.3B and 8B against other systems; d: 14B and 20B;
e: loss curves. Each row is in `gpu_PART_CARD.json` as soon as it is measured, and is not measured again.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from benchmarks.gpu.parts import PARTS, Options
from benchmarks.gpu.rows import Rows, card
from benchmarks.runner import RESULTS, print_table


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON files (%(default)s)")
    parser.add_argument("--kept", type=Path, help="folder of a second copy of the JSON files")
    parser.add_argument(
        "--seconds", type=float, default=520, help="time limit of all rows together (%(default)s)"
    )
    parser.add_argument(
        "--match", default="", help="measure only rows whose names begin like this expression"
    )
    parser.add_argument("--disk", type=Path, help="folder of disk tiers; a temporary one if not given")
    parser.add_argument("--dry-run", action="store_true", help="tiny models on the CPU")
    return parser


def main() -> int:
    args = make_parser().parse_args()
    with tempfile.TemporaryDirectory(prefix="headwater-gpu-", dir=args.disk) as disk:
        options = Options(args.dry_run, Path(disk))
        name = f"gpu_{args.part}_{'dry_run' if args.dry_run else card()}.json"
        rows = Rows(args.out / name, args.seconds, options.device, args.kept, args.match)
        PARTS[args.part](rows, options)
    print_table(rows.rows)
    return 1 if any("failed" in row or row.get("outcome") in ("failed", "error") for row in rows.rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
