"""One preparation of text, measured in a separate process: a part of `benchmarks.data`."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from benchmarks.resident import peak_rss_bytes
from headwater.data.prepare import prepare
from headwater.data.settings import PrepareSettings


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path, help="folder of texts")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("mode", help="kind of the samples, see headwater data --mode")
    return parser


def main() -> None:
    args = make_parser().parse_args()
    settings = PrepareSettings(args.tokenizer, sequence_length=1024, mode=args.mode)
    cpu_s, wall_s = time.process_time(), time.monotonic()
    made = prepare([args.source], args.out, settings)
    found = {
        "tokens": made.tokens,
        "cpu_s": time.process_time() - cpu_s,
        "wall_s": time.monotonic() - wall_s,
        "peak_bytes": peak_rss_bytes(),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
