"""Search for the valid name that is most similar to a misspelled one, for error messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

_LONGEST_NAME = 100
"""Most characters of a word that are compared with names: difflib takes quadratic time."""


def nearest(word: str, valid: Iterable[str]) -> str | None:
    """Return the valid name that is most similar to `word` in any case, or `None` if none is similar."""
    names = {name.lower(): name for name in valid}
    matches = difflib.get_close_matches(word[:_LONGEST_NAME].lower(), names, n=1)
    return names[matches[0]] if matches else None


def nearest_sibling(path: Path) -> Path | None:
    """Return the file or folder beside `path` with the most similar name, or `None` if none is similar."""
    siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    near = nearest(path.name, siblings)
    return None if near is None else path.parent / near
