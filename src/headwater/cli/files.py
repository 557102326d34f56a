"""Text files that the user names on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from headwater.core.errors import ConfigError
from headwater.core.files import why_unreadable


def read_text(path: Path, what: str, *, remedy: str) -> str:
    """Return the content of a file in UTF-8.

    Args:
        path: the file.
        what: what the file has, for the error.
        remedy: remedy of the error.

    Raises:
        ConfigError: if the file cannot be read.
    """
    try:
        return path.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{what} cannot be read: {why_unreadable(error)}", where=str(path), remedy=remedy
        ) from error


def write_text(path: Path, text: str, *, mode: Literal["x", "w"] = "w", remedy: str) -> None:
    """Write a file in UTF-8.

    Args:
        path: the file.
        text: its content.
        mode: `w` to replace an existing file, `x` to refuse it.
        remedy: remedy of the error.

    Raises:
        ConfigError: if the file cannot be written; with mode `x`, also if it exists already.
    """
    try:
        with path.open(mode, encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(
            f"the file cannot be written: {error.strerror}", where=str(path), remedy=remedy
        ) from error
