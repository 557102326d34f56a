"""Ranks as actors of a Ray cluster with two nodes, each in a separate network namespace."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from benchmarks.namespaces import Hosts, available
from run_samples import assert_same_checkpoint, history

import quick_start

needs_hosts = pytest.mark.skipif(available() is not None, reason=str(available()))

TWO = "--num_csx=2"
ENDLESS = "--trainer.init.loop.max_steps=100000"


class Cluster:
    """A Ray cluster, and runs on it.

    Args:
        hosts: two hosts; each becomes a node with two CPUs.
        folder: for what Ray writes.
    """

    def __init__(self, hosts, folder):
        self.hosts, self.folder = hosts, folder
        self.address = f"{hosts.address(0)}:6379"
        self._nodes = []
        quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0"}
        # Otherwise each run starts two idle workers on each node before it asks for its ranks.
        quiet["RAY_prestart_worker_first_driver"] = quiet["RAY_enable_worker_prestart"] = "0"
        self._environment = {**os.environ, **quiet, "RAY_TMPDIR": str(folder)}
        self._environment["PYTHONPATH"] = quick_start.with_site(os.environ.get("PYTHONPATH", ""))
        self._environment.pop("CUDA_VISIBLE_DEVICES", None)  # the nodes claim GPUs that this host has not

    def start_nodes(self):
        """Start both. The second ends with an error if the first is not ready within two seconds."""
        self._start_node(0, "--head", "--port=6379", "--include-dashboard=false")
        self._start_node(1, f"--address={self.address}")

    def _start_node(self, host, *options):
        own = [f"--node-ip-address={self.hosts.address(host)}", "--num-cpus=2", "--num-gpus=2", "--block"]
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *options, *own]
        # The start is real, because Ray knows its processes by their command lines.
        path = self.folder / f"host{host}.log"
        with path.open("w") as log, quick_start.real_starts():
            node = self.hosts.start(
                host, command, env=self._environment, stdout=log, stderr=log, cwd=self.folder
            )
        self._nodes.append(node)
        wait_for(lambda: "will now block" in path.read_text(), or_show=path.read_text)

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
        """The processes of all ranks, by number."""
        found = {}
        for process in (*self.hosts.processes(0), *self.hosts.processes(1)):
            with contextlib.suppress(OSError):
                words, variables = (
                    Path(f"/proc/{process}/{name}").read_text().split("\0") for name in ("cmdline", "environ")
                )
                numbers = [each.removeprefix("RANK=") for each in variables if each.startswith("RANK=")]
                if "headwater" in words and numbers:
                    found[int(numbers[0])] = process
        return found

    def end(self):
        """End all that runs on the hosts."""
        for host in range(2):
            for process in self.hosts.processes(host):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
        for node in self._nodes:
            node.wait()


def wait_for(condition, seconds=120, or_show=str):
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, f"it never came: {or_show()}"
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


@pytest.mark.slow
@needs_hosts
def test_ray_actors_are_bit_identical_to_processes_and_can_be_interrupted(cluster, alone, params, tmp_path):
    run = tmp_path / "run"
    code, output = cluster.fit(params, TWO, "--trainer.init.loop.max_steps=3")
    assert code == 0, output
    assert "done: step 3" in output
    assert output.count("validation loss") == 1, "it is printed once"
    assert history(run) == [record for record in history(alone) if record["step"] <= 3]

    driver = cluster.start(params, TWO, "--ranks_per_node=1", ENDLESS)
    wait_for((run / "checkpoint_6/manifest.json").exists)
    driver.send_signal(signal.SIGINT)
    output, _ = driver.communicate(timeout=120)
    assert driver.returncode == 130, output
    assert "stopped after step" in output
    assert "Traceback" not in output
    losses = [[r["loss"] for r in history(each) if r["kind"] == "train"][:6] for each in (run, alone)]
    assert losses[0] == losses[1]
    assert_same_checkpoint(run / "checkpoint_6", alone / "checkpoint_6")


@pytest.mark.slow
@pytest.mark.real_start  # one of these tests starts the command as a user does
@needs_hosts
def test_an_interrupt_before_training_begins_ends_the_run(cluster, params, tmp_path):
    # No input worker answers there, so training cannot begin, however late the interrupt is.
    data = "--trainer.fit.train_dataloader.input_workers=[10.77.0.9:1]"
    driver = cluster.start(params, TWO, ENDLESS, "--gpus_per_rank=1", data)
    wait_for(lambda: len(cluster.ranks()) == 2)
    given = [Path(f"/proc/{rank}/environ").read_text().split("\0") for rank in cluster.ranks().values()]
    seen = {word for words in given for word in words if word.startswith("CUDA_VISIBLE_DEVICES=")}
    assert seen == {"CUDA_VISIBLE_DEVICES=0", "CUDA_VISIBLE_DEVICES=1"}, "each sees one of its own"
    driver.send_signal(signal.SIGINT)
    output, _ = driver.communicate(timeout=120)
    assert driver.returncode == 130, output
    assert not (tmp_path / "run/history.jsonl").exists()
    wait_for(lambda: not cluster.ranks())


@pytest.mark.slow
@needs_hosts
def test_a_rank_whose_actor_is_killed_is_named_and_ends_the_run(cluster, params, tmp_path):
    driver = cluster.start(params, TWO, ENDLESS)
    wait_for((tmp_path / "run/checkpoint_3/manifest.json").exists)
    process = cluster.ranks()[1]
    os.kill(psutil.Process(process).ppid(), signal.SIGKILL)
    output, _ = driver.communicate(timeout=120)
    assert driver.returncode == 2, output
    assert f"error: rank 1 (process {process} on {os.uname().nodename}, 10.77.0." in output
    assert "is gone" in output
    assert output.count("error:") == 1, output
    wait_for(lambda: not cluster.ranks())


@pytest.mark.slow
@needs_hosts
def test_ray_prints_an_error_once_and_refuses_missing_resources(cluster, params):
    code, output = cluster.fit(params, TWO, "--trainer.fit.train_dataloader.batch_size=7")
    assert code == 2, output
    assert "error: batch_size 7 cannot be divided" in output
    assert output.count("error:") == 1, output

    code, output = cluster.fit(params, TWO, "--cpus_per_rank=3", "--wait=1")
    assert code == 2, output
    assert "error: the Ray cluster cannot provide 2 times 3 CPUs: its nodes have 2 CPUs; 2 CPUs" in output

    code, output = cluster.fit(params, "--num_csx=3", "--gpus_per_rank=1", "--ranks_per_node=3", "--wait=1")
    assert code == 2, output
    assert "cannot provide 1 times 3 CPUs, 3 GPUs" in " ".join(output.split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--address=127.0.0.1:1"], "nothing answers at 127.0.0.1:1"),
        (
            ["--address=ray://127.0.0.1:10001"],
            "expected HOST:PORT or auto as the address of a Ray cluster, got 'ray://127.0.0.1:10001'",
        ),
        (["--address=here"], "got 'here'"),
        (["--ranks_per_node=3"], "2 ranks cannot be divided equally into nodes of 3"),
        (["--cpus_per_rank=0"], "--cpus_per_rank >= 1, got 0"),
        (
            ["--trainer.init.backend.compile_only=true"],
            "compile_only and validate_only cannot run on a Ray cluster",
        ),
    ],
)
def test_bad_input_is_refused(headwater, params, options, message):
    code, _, error = headwater("ray", "fit", params, TWO, *options)
    assert code == 2
    assert message in error


def test_without_ray_the_extra_is_named(headwater, params, monkeypatch):
    monkeypatch.delitem(sys.modules, "headwater.fabric.launch.ray", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    code, _, error = headwater("ray", "fit", params, TWO)
    assert code == 2
    assert "pip install 'headwater[ray]'" in error
