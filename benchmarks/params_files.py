"""Count the params files of a folder that are understood: `python -m benchmarks.params_files FOLDER`.

The files of an older public release are in a folder named after its tag. If neither a file nor its folder
names a model, the file is read again with `--model`.
"""

from __future__ import annotations

import argparse
import collections
from pathlib import Path

from headwater.config import load_params
from headwater.core.errors import ConfigError

_NO_NAME = "the key 'name' of the model is missing"
"""The error for a file that names no model."""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", help="model of files that name no model")
    return parser


def main() -> None:
    args = make_parser().parse_args()
    understood: collections.Counter[str] = collections.Counter()
    every: collections.Counter[str] = collections.Counter()
    refused: collections.Counter[str] = collections.Counter()
    for path in sorted(args.folder.rglob("*.yaml")):
        release = path.relative_to(args.folder).parts[0]
        every[release] += 1
        problem = problem_of(path, args.model)
        understood[release] += problem is None
        if problem is not None:
            refused[problem] += 1
            print(f"{path}: {problem}")
    for release, count in every.items():
        print(f"{release}: {understood[release]} of {count}")
    print(f"all: {understood.total()} of {every.total()}")
    for problem, count in refused.most_common():
        print(f"{count:4} {problem}")


def problem_of(path: Path, model: str | None) -> str | None:
    """Return the problem of a file, or `None` if the file is understood.

    A file that names no model is read again with `model`, if that is given.
    """
    try:
        load_params(path)
    except ConfigError as error:
        if error.what != _NO_NAME or model is None:
            return error.what.partition(" (and ")[0][:150]
    else:
        return None
    try:
        load_params(path, [f"--model={model}"])
    except ConfigError as error:
        return f"--model {model}: {error.what[:150]}"
    return None


if __name__ == "__main__":
    main()
