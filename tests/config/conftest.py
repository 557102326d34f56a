"""One params file in each form, on disk."""

import pytest
from params_samples import NEWER, OLDER, write


@pytest.fixture
def newer(tmp_path):
    return write(tmp_path, NEWER)


@pytest.fixture
def older(tmp_path):
    return write(tmp_path, OLDER, "older.yaml")
