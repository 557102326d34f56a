"""Types of command-line options, whose errors say what was expected and found; and the end by SIGTERM."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from headwater.core.errors import ConfigError
from headwater.core.names import nearest, similar
from headwater.core.units import parse_bytes


def at_least(least: int) -> Callable[[str], int]:
    """Return the type of an option: a whole number that is not smaller than `least`."""

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected a whole number of at least {least}, found {text!r}")
        return int(text)

    return number


positive = at_least(1)


def fraction(text: str) -> float:
    """Return a number from 0 to 1."""
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found <= 1:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to 1, found {text!r}")
    return found


def size(text: str) -> str:
    """Return the text of a number of bytes, such as 4GiB."""
    try:
        parse_bytes(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(f"{error.what}; {error.remedy}") from error
    return text


def names_of(known: Collection[str]) -> Callable[[str], list[str]]:
    """Return the type of an option: names, separated by commas."""

    def names(text: str) -> list[str]:
        found = text.split(",")
        for name in found:
            if name not in known:
                close = nearest(name, known)
                more = f"; did you mean {close!r}?" if close else ""
                raise argparse.ArgumentTypeError(f"expected {', '.join(known)}, found {name!r}{more}")
        return found

    return names


def require_files(parser: argparse.ArgumentParser, option: str, folder: Path, *patterns: str) -> None:
    """End with an error if this is not a folder that has a file for each of these patterns."""
    if not folder.is_dir():
        parser.error(f"{option}: expected a folder, found {str(folder)!r}, which is not one")
    if missing := [pattern for pattern in patterns if not any(folder.glob(pattern))]:
        parser.error(f"{option}: expected {', '.join(patterns)}; {str(folder)!r} has no {', '.join(missing)}")


def require_place(parser: argparse.ArgumentParser, option: str, file: Path) -> None:
    """End with an error if a file cannot be written here, before hours of work are lost."""
    if file.is_dir() or not file.parent.is_dir():
        parser.error(f"{option}: expected a file in a folder that exists, found {str(file)!r}")


def matching(
    parser: argparse.ArgumentParser, option: str, words: Sequence[str], names: Sequence[str]
) -> list[str]:
    """Return the names that contain one of these words. End with an error if a word is in no name."""
    for word in words:
        if not any(word.lower() in name.lower() for name in names):
            near = similar(word, names, 3, 0.3) or names[:3]
            parser.error(f"{option}: no name contains {word!r}; some names: {', '.join(near)}")
    return [name for name in names if any(word.lower() in name.lower() for word in words)]


def end_on_sigterm() -> None:
    """Turn SIGTERM into an exception, so that the program removes its files and ends its processes."""

    def end(number: int, frame: FrameType | None) -> NoReturn:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, end)
