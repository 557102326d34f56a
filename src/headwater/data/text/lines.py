"""Lines of text files, compressed or not."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path

from headwater.core.errors import DataError


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines of a file, compressed or not, without their ends, numbered from 1.

    Raises:
        DataError: if it cannot be read, or is not UTF-8.
    """
    try:
        with (
            gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8")
        ) as file:
            for number, line in enumerate(file, start=1):
                yield number, line.rstrip("\r\n")
    except (OSError, UnicodeDecodeError, EOFError) as error:
        raise DataError(f"cannot read the file: {error}", where=str(path), remedy="copy it again") from error
