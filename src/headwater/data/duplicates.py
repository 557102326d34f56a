"""Texts and records that occur more than once in the input of a preparation."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from typing import Any

from headwater.data.raw_records import Record

_DIGEST_BYTES = 16


class Duplicates:
    """Finds texts that are equal to an earlier one, apart from white space and upper and lower case.

    Each text takes about 100 bytes of memory, however long it is.

    Args:
        skip: leave duplicates out; otherwise no text counts as a duplicate.

    Attributes:
        count: number of duplicates found.
    """

    def __init__(self, *, skip: bool = False) -> None:
        self.skip = skip
        self.count = 0
        self._seen: set[bytes] = set()

    def is_new(self, blocks: Iterable[str]) -> bool:
        """Return false if a text is a duplicate, and count it.

        Args:
            blocks: the text, in any number of parts.
        """
        if not self.skip:
            return True
        digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        for block in blocks:
            # All white space is removed, so that the digest does not depend on the cuts between blocks.
            digest.update("".join(block.casefold().split()).encode("utf-8", "surrogatepass"))
        key = digest.digest()
        if key in self._seen:
            self.count += 1
            return False
        self._seen.add(key)
        return True

    def new_records(self, records: Iterable[Record]) -> Iterator[Record]:
        """Yield the records whose fields differ from those of all earlier records."""
        for record in records:
            if not self.skip or self.is_new([_text_of(record)]):
                yield record


def _text_of(record: Record) -> str:
    """Return the fields of a record as text; values that JSON does not have are written as Python does."""
    return json.dumps(_without_space(record.fields), sort_keys=True, ensure_ascii=False, default=str)


def _without_space(value: Any) -> Any:
    """Return a value without white space in its strings, since JSON would write some of it as escapes."""
    if isinstance(value, str):
        return "".join(value.split())
    if isinstance(value, dict):
        return {key: _without_space(each) for key, each in value.items()}
    return [_without_space(each) for each in value] if isinstance(value, list) else value
