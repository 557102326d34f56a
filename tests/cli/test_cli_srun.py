"""Ranks under a real `srun`, on a cluster of two nodes on loopback: the same numbers, and what ends them."""

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from run_samples import losses, wait_for

import quick_start
import slurm_cluster
from headwater.core.exit_codes import INTERRUPTED
from headwater.trainer.checkpoint_inspection import complete_checkpoints

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to start a cluster of its own"),
    pytest.mark.skipif(
        slurm_cluster.missing() is not None, reason=f"needs Slurm, and there is no {slurm_cluster.missing()}"
    ),
]

LOOP = Path(__file__).parents[1] / "api_loop/ranks_script.py"
HOST = slurm_cluster.host_name()
ONE_NODE, TWO_NODES = ("--ntasks=2", f"--nodelist={HOST}"), ("--nodes=2", "--ntasks=2")
ENDLESS = ("--max_steps=1000000", "--eval_frequency=0")
HEADWATER = (sys.executable, "-m", "headwater")


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """Two nodes; the first has the name of this machine, by which ranks find it."""
    with slurm_cluster.cluster(HOST, f"{HOST}-too") as configuration, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", configuration)
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("PYTHONPATH", quick_start.with_site(os.environ.get("PYTHONPATH", "")))
        yield


@contextmanager
def step_of(*words, folder):
    """A step of `srun` in `folder`, which does not outlive the test."""
    command = ["srun", *map(str, words)]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()  # it ends its tasks


def run(*words, folder):
    """Run a step to its end; return its exit code and its output."""
    with step_of(*words, folder=folder) as process:
        output, _ = process.communicate(timeout=200)
    return process.returncode, output


@pytest.mark.parametrize("step", [ONE_NODE, TWO_NODES], ids=["one node", "two nodes"])
def test_losses_under_srun_equal_those_of_headwaters_launcher(params, alone, tmp_path, step):
    code, output = run(*step, *HEADWATER, "fit", params, "--num_csx=2", folder=tmp_path)
    assert code == 0, output
    assert losses(tmp_path / "run") == losses(alone)
    assert output.count("done: step 6") == 1, "one rank speaks"


TORCHRUN = """\
exec torchrun --nnodes 2 --node_rank $SLURM_NODEID --nproc_per_node 1 \
    --master_addr 127.0.0.1 --master_port {port} "$@"
"""


def test_a_users_loop_under_srun_and_under_torchrun_in_srun(tmp_path):
    script = tmp_path / "start.sh"
    script.write_text(TORCHRUN.format(port=slurm_cluster.free_ports(1)[0]))
    python = (sys.executable,)
    starts = {
        "alone": python,
        "srun": ("srun", *TWO_NODES, *python),
        "torchrun": ("srun", *TWO_NODES, "sh", script),
    }
    found = {}
    for name, start in starts.items():
        (tmp_path / name).mkdir()
        words = [*map(str, start), str(LOOP), "2", str(tmp_path / name)]
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "PATH": path})
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count("trained") == 1
        found[name] = json.loads((tmp_path / name / "seen_0.json").read_text())
    assert found["srun"] == found["torchrun"] == found["alone"]


def task(number, folder):
    """The process of a task that works in `folder`."""
    for process in psutil.process_iter(["environ", "cmdline"]):
        environment, words = process.info["environ"] or {}, process.info["cmdline"] or []
        if str(folder) in " ".join(words) and environment.get("SLURM_PROCID") == str(number):
            return process
    raise AssertionError(f"unknown task {number}")


@pytest.mark.parametrize(("step", "rank"), [(ONE_NODE, 0), (TWO_NODES, 1)], ids=["one node", "two nodes"])
def test_a_rank_that_is_killed_ends_the_step_and_is_named(params, tmp_path, step, rank):
    words = (*HEADWATER, "fit", params, "--num_csx=2", *ENDLESS)
    with step_of(*step, *words, folder=tmp_path) as process:
        wait_for(tmp_path / "run/history.jsonl")
        task(rank, tmp_path).kill()
        output, _ = process.communicate(timeout=60)
    assert process.returncode not in (0, INTERRUPTED)
    named = (
        rf"rank {rank} \(process \d+\) is gone"
        if step is ONE_NODE
        else rf"cannot reach \S+ \(node {rank}\), rank {rank}"
    )
    assert re.search(named, output), output
    assert (
        output.count("error: rank" if step is ONE_NODE else "error: host") == 1 and "Traceback" not in output
    )


def ctrl_c(process):
    """Send the signal as a terminal does; `srun --disable-status` forwards the first one."""
    process.send_signal(signal.SIGINT)


def scancel(process):
    """Asks all jobs of the cluster, which are this step, to end, and leaves them the time they need."""
    subprocess.run(["scancel", "--signal=TERM", "--user=root"], check=True)


@pytest.mark.parametrize("stop", [ctrl_c, scancel])
def test_stopping_a_slurm_step_writes_a_checkpoint(params, alone, tmp_path, stop):
    words = (*HEADWATER, "fit", params, "--num_csx=2", *ENDLESS, "--checkpoint_steps=1000000")
    with step_of("--disable-status", *TWO_NODES, *words, folder=tmp_path) as process:
        wait_for(tmp_path / "run/history.jsonl")
        stop(process)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == INTERRUPTED, output
    done = len(losses(tmp_path / "run"))
    assert f"stopped after step {done}" in output
    assert complete_checkpoints(tmp_path / "run") == [tmp_path / f"run/checkpoint_{done}"]
