"""Lines of text files, compressed or not."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path

from headwater.core.errors import DataError


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the number (from 1) and text of each line of a file, compressed (.gz) or not.

    Raises:
        DataError: if the file cannot be read, or is not UTF-8.
    """
    try:
        with (
            gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8")
        ) as file:
            for number, line in enumerate(file, start=1):
                yield number, line.rstrip("\r\n")
    except (OSError, UnicodeDecodeError, EOFError) as error:
        raise DataError(f"cannot read the file: {error}", where=str(path), remedy="copy it again") from error
