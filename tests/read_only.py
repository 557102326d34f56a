"""A folder that cannot be written, also where the tests run as root."""

import os
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def another_user():
    """Drop the rights of root, which may write everywhere."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def protected():
    """Yield a folder that its user may read but not write; other users cannot reach pytest's folders."""
    with tempfile.TemporaryDirectory() as above:
        Path(above).chmod(0o755)
        folder = Path(above) / "protected"
        folder.mkdir(0o555)
        yield folder
