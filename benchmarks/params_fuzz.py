"""Mutated params files: `python -m benchmarks.params_fuzz COUNT [SEED]` reports errors of other kinds."""

from __future__ import annotations

import argparse
import random
import re
import tempfile
import time
import traceback
from pathlib import Path

from headwater.config import load_params, shipped_params
from headwater.core.errors import HeadwaterError

ODD = [
    "",
    "null",
    "[]",
    "{}",
    "[1, {a: b}]",
    "{a: {b: c}}",
    "-1",
    "0",
    "1e308",
    ".nan",
    "true",
    "~x",
    "'",
    '"',
    "&a [*a]",
]
ODD += [
    "9" * 30,
    "9" * 5000,
    "x" * 3000,
    "\0",
    "[" * 100,
    "!!set {a}",
    "!!int x",
    "<<: *a",
    "*a",
    "2024-01-01",
    "0x",
    "1:2",
]


def mutated(text: str, random_: random.Random) -> str:
    lines = text.splitlines()
    for _ in range(random_.randint(1, 4)):
        index = random_.randrange(len(lines))
        key, colon, _ = lines[index].partition(":")
        match random_.randrange(5):
            case 0:
                lines[index] = f"{key}{colon} {random_.choice(ODD)}"
            case 1:
                lines.insert(random_.randrange(len(lines)), lines[index])
            case 2:
                del lines[index]
                lines = lines or ["a: 1"]
            case 3:
                lines[index] = " " * random_.randrange(6) + lines[index].lstrip()
            case 4:
                place = random_.randrange(len(lines[index]) + 1)
                lines[index] = (
                    lines[index][:place] + random_.choice("{}[]:,&*!#\t'\"x0") + lines[index][place:]
                )
    return "\n".join(lines) + "\n"


def text_of(path: Path) -> str:
    """Return the text of a params file that extends the same file from any folder."""
    return re.sub(
        r"^extends: (\S+\.yaml)$",
        lambda found: f"extends: {(path.parent / found[1]).resolve()}",
        path.read_text(),
        flags=re.MULTILINE,
    )


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int, help="number of files")
    parser.add_argument("seed", type=int, nargs="?", default=0)
    return parser


def main() -> None:
    args = make_parser().parse_args()
    sources = [text_of(path) for path in shipped_params().values()]
    slowest, raw, valid = 0.0, 0, 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "params.yaml"
        for number in range(args.count):
            random_ = random.Random(f"{args.seed} {number}")
            path.write_text(mutated(random_.choice(sources), random_))
            started = time.process_time()
            try:
                load_params(path)
                valid += 1
            except HeadwaterError:
                pass
            except Exception:  # noqa: BLE001  # the fuzzer searches for these: it counts and prints them
                raw += 1
                print(f"document {number}:\n{traceback.format_exc(limit=-3)}")
            slowest = max(slowest, time.process_time() - started)
    print(
        f"{args.count} documents, {valid} valid, {raw} raised other errors, the slowest took {slowest:.2f} s"
    )


if __name__ == "__main__":
    main()
