"""Inputs that the data tests share."""

import gzip
from pathlib import Path

import pytest

from headwater.data.assets import sample_text
from shared_data import SHARED


@pytest.fixture(scope="session")
def book() -> str:
    """The first 200,000 characters of the shipped novel."""
    return gzip.decompress(sample_text().read_bytes()).decode()[:200_000]


@pytest.fixture(scope="session")
def shared() -> Path:
    """Folder of real data, where this machine has it."""
    folder = SHARED / "data"
    if not folder.is_dir():
        pytest.skip("no shared data here")
    return folder


@pytest.fixture
def text_file(tmp_path: Path, book: str) -> Path:
    path = tmp_path / "book.txt"
    path.write_text(book, encoding="utf-8")
    return path
