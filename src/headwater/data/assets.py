"""The text that ships with the package."""

from __future__ import annotations

from pathlib import Path

_TEXT = Path(__file__).resolve().parents[1] / "assets" / "text"


def sample_text() -> Path:
    """Return the path of a gzipped public-domain novel (1 MB of text), the input of a first run."""
    return _TEXT / "great_expectations.txt.gz"
