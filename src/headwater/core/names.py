"""Search for the valid name that is most similar to a misspelled one, for error messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

_LONGEST_NAME = 100
"""Largest number of characters of a word that are compared with names: difflib takes quadratic time."""


def nearest(word: str, valid: Iterable[str]) -> str | None:
    """Return the valid name that is most similar to `word` in any case, or `None` if none is similar."""
    return next(iter(similar(word, valid, count=1)), None)


def similar(word: str, valid: Iterable[str], count: int, cutoff: float = 0.6) -> list[str]:
    """Return the valid names that are similar to a word in any case, the most similar first.

    Args:
        word: the word.
        valid: the valid names.
        count: largest number of names to return.
        cutoff: smallest ratio of equal characters, from 0 to 1 (`difflib.SequenceMatcher.ratio`).
    """
    names = {name.lower(): name for name in valid}
    word = word[:_LONGEST_NAME].lower()
    return [names[match] for match in difflib.get_close_matches(word, names, n=count, cutoff=cutoff)]


def nearest_sibling(path: Path) -> Path | None:
    """Return the file or folder beside `path` with the most similar name, or `None` if none is similar."""
    siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    near = nearest(path.name, siblings)
    return None if near is None else path.parent / near
