"""Error reports of ranks, and the process that has started a rank."""

import os
import subprocess
import time

import pytest

from headwater.core.errors import ConfigError
from headwater.fabric.consistency import check_consistency
from headwater.fabric.fabric import ALONE
from headwater.fabric.parent import find_parent, is_alive
from headwater.fabric.report import read_report, report, report_traceback, reported_error


def test_an_error_is_the_same_after_a_report(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error"))
    assert report(ConfigError("expected 1, got 2", where="seed", remedy="write 1"))
    error = reported_error(read_report(str(tmp_path / "error")))
    assert type(error) is ConfigError
    assert (error.what, error.where, error.remedy) == ("expected 1, got 2", "seed", "write 1")
    assert report_traceback("Traceback …")
    assert read_report(str(tmp_path / "error"))["traceback"] == "Traceback …"


def test_a_rank_prints_an_error_that_it_cannot_report(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    assert not report_traceback("text")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "no folder" / "error"))
    assert not report_traceback("text")


@pytest.mark.parametrize("content", ["", "[]", '{"message": "from torch"}'])
def test_a_file_without_a_report_is_ignored(content, tmp_path):
    (tmp_path / "error").write_text(content)
    assert read_report(str(tmp_path / "error")) == {}


def test_a_program_that_a_rank_starts_is_not_a_rank(monkeypatch):
    launcher = os.getpid()  # alive, but not the parent of this process
    for name, value in {"HEADWATER_PARENT": launcher, "RANK": 1, "HEADWATER_SECRET": "x"}.items():
        monkeypatch.setenv(name, str(value))
    find_parent()
    assert not {"HEADWATER_PARENT", "RANK", "HEADWATER_SECRET"} & set(os.environ)


def test_a_zombie_is_not_alive():
    process = subprocess.Popen(["true"], stdout=subprocess.PIPE)
    process.stdout.read()  # until the process ends
    process.stdout.close()
    while is_alive(process.pid):
        time.sleep(0.001)
    process.wait()
    assert is_alive(os.getpid())


class _TwoRanks(type(ALONE)):
    """Two ranks; the other one has given values."""

    def __init__(self, other):
        self.other = other

    def gather_objects(self, value, kind):
        return [value, self.other]


def test_ranks_with_different_arguments_are_refused():
    check_consistency(_TwoRanks({"seed": "1"}), {"seed": "1"})
    with pytest.raises(ConfigError, match="seed differs between ranks: rank 0 has 1, rank 1 has 2"):
        check_consistency(_TwoRanks({"seed": "2"}), {"seed": "1"})
    with pytest.raises(ConfigError, match="model differs between ranks: rank 0 has None, rank 1 has gpt"):
        check_consistency(_TwoRanks({"seed": "1", "model": "gpt"}), {"seed": "1"})
