"""The text that ships with the package."""

from __future__ import annotations

from pathlib import Path

_TEXT = Path(__file__).resolve().parents[1] / "assets" / "text"


def sample_text() -> Path:
    """Path of a public-domain novel of 1 MB, gzipped: input for a first run that downloads nothing."""
    return _TEXT / "great_expectations.txt.gz"
