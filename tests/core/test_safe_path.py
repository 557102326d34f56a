"""Modules that another user has put into the working folder are not imported."""

import os
import subprocess
import sys

import pytest

from headwater.core.safe_path import safe_path

pytestmark = pytest.mark.real_start

PLANTED = """\
import os
os.close(os.open("ran", os.O_CREAT | os.O_WRONLY))
raise SystemExit("a planted module was imported")
"""
TRACKER = """\
from headwater.trainer.interrupt import shielded
assert list(shielded([1, 2])) == [1, 2]
"""
POOL = """\
from headwater.data.workers import ordered_map
if __name__ == "__main__":
    assert list(ordered_map(abs, [-1, 2, -3], num_workers=2)) == [1, 2, 3]
"""
LOADER = """\
from headwater.data.loader import BatchLoader, Workers
from headwater.data.order import SampleOrder
class Numbers:
    def __getitems__(self, draws):
        return [int(draw) for draw in draws]
if __name__ == "__main__":
    loader = BatchLoader(Numbers(), SampleOrder(4, 2, repeat=False), Workers(1))
    assert list(loader) == [[0, 1], [2, 3]]
"""


@pytest.mark.parametrize("script", [TRACKER, POOL, LOADER], ids=["tracker", "pool", "loader"])
def test_helpers_of_multiprocessing_import_nothing_from_the_working_folder(script, tmp_path):
    path, working = tmp_path / "script.py", tmp_path / "working"
    path.write_text(script)
    working.mkdir()
    for name in ("multiprocessing", "torch", "json"):
        (working / f"{name}.py").write_text(PLANTED)
    done = subprocess.run([sys.executable, str(path)], cwd=working, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not (working / "ran").exists()


def test_the_environment_is_restored(monkeypatch):
    for before in (None, "0"):
        monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
        if before is not None:
            monkeypatch.setenv("PYTHONSAFEPATH", before)
        with safe_path():
            assert os.environ["PYTHONSAFEPATH"] == "1"
        assert os.environ.get("PYTHONSAFEPATH") == before
