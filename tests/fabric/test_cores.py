"""The cores of a rank on a machine with several NUMA nodes."""

import os
import subprocess
import sys

import pytest

from headwater.fabric.launch.cores import cores_of_ranks


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Return a function that makes a machine of NUMA nodes on which this process may use `allowed` cores."""

    def make(*nodes, allowed=range(1024)):
        monkeypatch.setattr("headwater.fabric.launch.cores._NODES", tmp_path)
        monkeypatch.setattr("os.sched_getaffinity", lambda process: set(allowed))
        for number, cores in enumerate(nodes):
            (tmp_path / f"node{number}").mkdir()
            (tmp_path / f"node{number}/cpulist").write_text(f"{cores}\n")

    return make


@pytest.mark.parametrize(
    ("nodes", "allowed", "count", "wanted"),
    [
        (["0-3", "4-7"], range(8), 2, [{0, 1, 2, 3}, {4, 5, 6, 7}]),
        (["0-1,4-5", "2-3,6-7"], range(8), 2, [{0, 1, 4, 5}, {2, 3, 6, 7}]),
        (["0-3", "4-7"], range(8), 4, [{0, 1}, {2, 3}, {4, 5}, {6, 7}]),
        (["0-3", "4-7"], range(2, 6), 2, [{2, 3}, {4, 5}]),
        (["0-3", "4-7", ""], range(8), 1, [{0, 1, 2, 3, 4, 5, 6, 7}]),
        (["0-3"], range(4), 2, None),
        (["0-3", "4-7"], range(4), 2, None),
        ([], range(4), 2, None),
    ],
)
def test_cores_of_ranks_follow_the_numa_nodes(machine, nodes, allowed, count, wanted):
    machine(*nodes, allowed=allowed)
    assert cores_of_ranks(count) == wanted


@pytest.mark.real_start
def test_a_launcher_imports_no_torch():
    command = "import sys, headwater.cli.ranks, headwater.cli.output; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="this machine has one core")
def test_ranks_are_bound_to_their_cores(tmp_path):
    first, second = sorted(os.sched_getaffinity(0))[:2]
    nodes = tmp_path / "nodes"
    for number, core in enumerate((first, second)):
        (nodes / f"node{number}").mkdir(parents=True)
        (nodes / f"node{number}/cpulist").write_text(f"{core}\n")
    launcher = f"""
import sys
from pathlib import Path
import headwater.fabric.launch.cores as cores
from headwater.core.placement import Placement
from headwater.fabric.launch.launcher import launch
cores._NODES = Path({str(nodes)!r})
rank = '''
import os, time
time.sleep(0.5)
print(os.environ["RANK"], os.environ["WORLD_SIZE"], sorted(os.sched_getaffinity(0)), flush=True)
'''
sys.exit(launch(Placement(2), ["-c", rank], where="here"))
"""
    done = subprocess.run([sys.executable, "-c", launcher], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"0 2 [{first}]", f"1 2 [{second}]"]
