"""Ranks as actors of a Ray cluster of two nodes, each in a network of its own."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from benchmarks.namespaces import Hosts, available
from run_samples import assert_same_checkpoint, history, write_params

from headwater.cli.main import main

needs_hosts = pytest.mark.skipif(available() is not None, reason=str(available()))

TWO = "--num_csx=2"
SPREAD = "--ranks_per_node=1"
ENDLESS = "--trainer.init.loop.max_steps=100000"


class Cluster:
    """A Ray cluster, and runs on it."""

    def __init__(self, hosts, folder):
        self.hosts, self.folder = hosts, folder
        self.address = f"{hosts.address(0)}:6379"
        quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0"}
        self._environment = {**os.environ, **quiet, "RAY_TMPDIR": str(folder)}

    def start_nodes(self):
        """Start both, and wait for them."""
        self._start_node(0, "--head", "--port=6379", "--include-dashboard=false")
        self._start_node(1, f"--address={self.address}")
        logs = [self.folder / f"host{host}.log" for host in range(2)]
        wait_for(lambda: all("will now block" in log.read_text() for log in logs))

    def _start_node(self, host, *options):
        own = [f"--node-ip-address={self.hosts.address(host)}", "--num-cpus=2", "--block"]
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *options, *own]
        with (self.folder / f"host{host}.log").open("w") as log:
            self.hosts.start(host, command, env=self._environment, stdout=log, stderr=log, cwd=self.folder)

    def start(self, *words):
        """Start a run from the first node."""
        command = [sys.executable, "-m", "headwater", "ray", "fit", f"--address={self.address}"]
        return self.hosts.start(
            0,
            [*command, *map(str, words)],
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def fit(self, *words):
        """Run it; the exit code, and what was printed."""
        driver = self.start(*words)
        output, _ = driver.communicate(timeout=120)
        return driver.returncode, output

    def ranks(self):
        """The processes of all ranks and the hosts on which they are, by number."""
        found = {}
        for host in range(2):
            for process in self.hosts.processes(host):
                with contextlib.suppress(OSError):
                    folder = Path(f"/proc/{process}")
                    words = (folder / "cmdline").read_bytes().split(b"\0")
                    variables = dict(
                        word.split(b"=", 1) for word in (folder / "environ").read_bytes().split(b"\0")[:-1]
                    )
                    if b"fit" in words and b"ray" not in words and b"RANK" in variables:
                        found[int(variables[b"RANK"])] = process, host
        return found

    def end(self):
        """End all that runs on the hosts."""
        for host in range(2):
            for process in self.hosts.processes(host):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)


def wait_for(condition, seconds=120):
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "it never came"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def cluster():
    folder = Path(tempfile.mkdtemp(prefix="ray"))  # sockets lie there: a long path will not do
    with contextlib.ExitStack() as undo:
        undo.callback(shutil.rmtree, folder)
        cluster = Cluster(undo.enter_context(Hosts(2)), folder)
        undo.callback(cluster.end)
        cluster.start_nodes()
        yield cluster


@pytest.fixture(scope="module")
def alone(tmp_path_factory, data):
    """The model_dir of the same run, which `headwater fit` has started."""
    folder = tmp_path_factory.mktemp("alone")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        assert main(["fit", str(write_params(folder, data)), TWO]) == 0
    return folder / "run"


def exact(model_dir):
    """The history without norms of all weights, which hosts add up in another order."""
    return [{k: v for k, v in record.items() if k != "weight_norm"} for record in history(model_dir)]


@needs_hosts
def test_actors_on_one_node_and_on_two_give_the_bits_of_ranks_that_headwater_fit_starts(
    cluster, alone, params, tmp_path
):
    code, output = cluster.fit(params, TWO, "--trainer.init.loop.max_steps=3")
    assert code == 0, output
    assert "done: step 3" in output
    assert output.count("validation loss") == 1, "it is printed once"
    run = tmp_path / "run"
    assert history(run) == [record for record in history(alone) if record["step"] <= 3]
    assert_same_checkpoint(run / "checkpoint_3", alone / "checkpoint_3")

    code, output = cluster.fit(params, TWO, SPREAD)
    assert code == 0, output
    assert exact(run) == exact(alone)
    assert_same_checkpoint(run / "checkpoint_6", alone / "checkpoint_6")


@needs_hosts
def test_a_run_that_is_interrupted_goes_on_and_a_rank_that_is_killed_ends_it(cluster, params, tmp_path):
    checkpoint = tmp_path / "run/checkpoint_3/manifest.json"
    driver = cluster.start(params, TWO, SPREAD, ENDLESS)
    wait_for(checkpoint.exists)
    driver.send_signal(signal.SIGINT)
    output, _ = driver.communicate(timeout=60)
    assert driver.returncode == 130, output
    assert "stopped after step" in output
    assert "Traceback" not in output

    steps = len(history(tmp_path / "run"))
    driver = cluster.start(params, TWO, SPREAD, ENDLESS)
    wait_for(lambda: len(history(tmp_path / "run")) > steps)
    ranks = cluster.ranks()
    process, host = ranks[1]
    assert ranks[0][1] != host
    os.kill(process, signal.SIGKILL)
    output, _ = driver.communicate(timeout=60)
    assert driver.returncode == 2, output
    place = f"process {process} on {os.uname().nodename}, {cluster.hosts.address(host)}"
    assert f"error: rank 1 ({place}) was ended by SIGKILL" in output
    assert output.count("error:") == 1, output
    wait_for(lambda: not cluster.ranks(), seconds=10)


@needs_hosts
def test_an_actor_that_is_killed_is_named(cluster, params, tmp_path):
    driver = cluster.start(params, TWO, ENDLESS)
    wait_for((tmp_path / "run/checkpoint_3/manifest.json").exists)
    process, _ = cluster.ranks()[0]
    (parent,) = (
        int(line.split()[1])
        for line in Path(f"/proc/{process}/status").read_text().splitlines()
        if line.startswith("PPid:")
    )
    os.kill(parent, signal.SIGKILL)
    output, _ = driver.communicate(timeout=60)
    assert driver.returncode == 2, output
    assert f"error: rank 0 (process {process} on {os.uname().nodename}" in output
    assert "is gone" in output
    wait_for(lambda: not cluster.ranks(), seconds=10)


@needs_hosts
@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["--trainer.fit.train_dataloader.batch_size=7"], "error: batch_size 7 cannot be divided"),
        (["--cpus_per_rank=3", "--wait=1"], "error: the Ray cluster has no place for 2 times 3 CPUs"),
    ],
)
def test_what_cannot_be_is_said_once(cluster, params, keys, message):
    code, output = cluster.fit(params, TWO, *keys)
    assert code == 2, output
    assert message in output
    assert output.count("error:") == 1, output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--address=127.0.0.1:1"], "nothing answers at 127.0.0.1:1"),
        (["--address=ray://127.0.0.1:10001"], "'ray://127.0.0.1:10001' is no address of a Ray cluster"),
        (["--address=here"], "'here' is no address"),
        (["--ranks_per_node=3"], "2 ranks cannot be divided into 3 for each node"),
        (["--cpus_per_rank=0"], "--cpus_per_rank is 0"),
        (["--trainer.init.backend.compile_only=true"], "compile_only and validate_only need no ranks"),
    ],
)
def test_bad_input_is_refused(headwater, params, options, message):
    code, _, error = headwater("ray", "fit", params, TWO, *options)
    assert code == 2
    assert message in error


def test_without_ray_the_extra_is_named(headwater, params, monkeypatch):
    monkeypatch.delitem(sys.modules, "headwater.fabric.ray", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    code, _, error = headwater("ray", "fit", params, TWO)
    assert code == 2
    assert "pip install 'headwater[ray]'" in error
