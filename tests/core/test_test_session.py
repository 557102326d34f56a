"""A test session leaves no files behind, and uses no GPU."""

import os
import subprocess
import sys
from pathlib import Path

import torch

TESTS = Path(__file__).parents[1]


def test_a_session_removes_its_folders_without_a_warning(tmp_path):
    command = ("-X", "dev", "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider")
    done = subprocess.run(
        [sys.executable, *command, TESTS / "docs" / "test_package.py"],
        cwd=TESTS.parent,
        env={key: value for key, value in os.environ.items() if key != "HEADWATER_TEST_CACHE"}
        | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Implicitly cleaning up" not in done.stderr
    assert not list(tmp_path.glob("headwater-*"))


def test_a_session_sees_no_gpu_unless_it_is_asked_for():
    if "HEADWATER_TEST_CUDA" not in os.environ:
        assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
        assert not torch.cuda.is_available()
