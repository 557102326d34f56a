"""The launcher of ranks: when ranks are started again, and which processes are ranks."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from headwater.core.errors import RankError
from headwater.core.placement import Placement
from headwater.fabric.launch.launcher import launch
from headwater.fabric.parent import find_parent

TWO = Placement(1, 1)
"""A compute rank and a store rank, which a machine of one core can have."""


def counted(tmp_path, rank, ending):
    """Return a program whose rank `rank` runs `ending` at its first start; a file counts the starts."""
    return f"""
import os, pathlib, signal, time
rank, starts = int(os.environ["RANK"]), pathlib.Path({str(tmp_path)!r}) / f"starts_{{os.environ['RANK']}}"
with starts.open("a") as file:
    file.write("x")
if rank == {rank} and len(starts.read_text()) == 1:
    {ending}
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_is_restarted(rank, tmp_path, capsys):
    command = counted(tmp_path, rank, "os.kill(os.getpid(), signal.SIGKILL)")
    assert launch(TWO, ["-c", command], where="here", max_restarts=1) == 0
    assert f"rank {rank}" in (said := capsys.readouterr().err) and "SIGKILL" in said
    assert "restarting from the last complete checkpoint (1 of 1)" in said
    assert [len((tmp_path / f"starts_{each}").read_text()) for each in (0, 1)][rank] == 2


def test_a_stopped_rank_is_not_reported_as_ended_by_the_signal_of_the_launcher(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("headwater.fabric.launch.launcher._GRACE_S", 0.5)
    command = f"""
import os, pathlib, signal, time
from headwater.core.errors import RankError
from headwater.fabric.parent import is_stopped
from headwater.fabric.report import report
other = pathlib.Path({str(tmp_path)!r}, "other")
if os.environ["RANK"] == "1":
    other.symlink_to(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)
while not other.is_symlink() or not is_stopped(int(os.readlink(other))):
    time.sleep(0.01)
report(RankError("rank 0 has waited 15 s for weights"))
raise SystemExit(2)
"""
    with pytest.raises(RankError, match="rank 0 has waited 15 s for weights"):
        launch(TWO, ["-c", command], where="here")
    said = capsys.readouterr().err
    assert "rank 1 (process " in said and "did not end and was killed" in said


def test_ranks_are_restarted_at_most_max_restarts_times(tmp_path):
    command = "import os, signal; os.kill(os.getpid(), signal.SIGRTMIN + 6)"
    with pytest.raises(RankError, match=f"ended by signal {signal.SIGRTMIN + 6}"):
        launch(TWO, ["-c", command], where="here", max_restarts=2)


@pytest.mark.parametrize(("rank", "raises"), [(0, False), (1, True)])
def test_a_rank_that_exits_with_an_error_is_not_restarted(rank, raises, tmp_path):
    command = counted(tmp_path, rank, "raise SystemExit(3)")
    try:
        assert launch(TWO, ["-c", command], where="here", max_restarts=5) == 3
        assert not raises
    except RankError as error:
        assert raises and f"rank {rank}" in error.what and "exit code 3" in error.what
    assert len((tmp_path / f"starts_{rank}").read_text()) == 1


def test_a_system_error_at_the_start_is_raised(monkeypatch):
    def refuse(*args, **options):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(RankError, match="rank 0 cannot be started: Resource temporarily unavailable"):
        launch(TWO, ["-c", ""], where="here", max_restarts=3)


def test_ranks_end_if_their_launcher_was_killed_early(tmp_path):
    rank = f"""
import pathlib, os, time
pathlib.Path({str(tmp_path)!r}, os.environ["RANK"]).write_text(str(os.getpid()))
time.sleep(1)
from headwater.fabric.parent import find_parent
find_parent()
time.sleep(100)
"""
    program = f"""
from headwater.core.placement import Placement
from headwater.fabric.launch.launcher import launch
launch(Placement(1, 1), ["-c", {rank!r}], where="here")
"""
    launcher = subprocess.Popen([sys.executable, "-c", program])
    ranks = [tmp_path / "0", tmp_path / "1"]
    while not all(path.exists() and path.read_text() for path in ranks):
        assert launcher.poll() is None
        time.sleep(0.01)
    processes = [psutil.Process(int(path.read_text())) for path in ranks]
    launcher.kill()
    launcher.wait()
    gone, alive = psutil.wait_procs(processes, timeout=30)
    assert len(gone) == 2 and not alive


def test_a_program_started_by_a_rank_is_not_a_rank(monkeypatch):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        names = {"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_ERROR_FILE": "nowhere"}
        for name, value in {**names, "HEADWATER_PARENT": str(other.pid), "OMP_NUM_THREADS": "1"}.items():
            monkeypatch.setenv(name, value)
        find_parent()
        assert not names.keys() & os.environ.keys()
        assert os.environ["OMP_NUM_THREADS"] == "1"
        other.kill()
