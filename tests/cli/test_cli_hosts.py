"""Ranks on several hosts, each in a network of its own: the same numbers, and what a cut link does."""

import os
import signal
import time

import pytest
from benchmarks.namespaces import Hosts, available
from run_samples import assert_same_checkpoint, history, losses, ranks_of, wait_for, write_params

from headwater.cli.main import main

pytestmark = pytest.mark.skipif(available() is not None, reason=str(available()))

TWO = "--num_csx=2"
ENDLESS = "--trainer.init.loop.max_steps=100000"


def fit(hosts, params, folder, *options, ranks=1):
    """Start a run on all hosts; it works in `folder / "run"`."""
    folder.mkdir(exist_ok=True)
    arguments = ["fit", str(params), f"--trainer.init.model_dir={folder}/run", TWO, *options]
    return hosts.start_ranks(arguments, ranks, folder, {**os.environ, "OMP_NUM_THREADS": "1"})


def wait(launchers, folder, timeout=120):
    """The exit codes of a run, and what its hosts have printed."""
    try:
        codes = [launcher.wait(timeout) for launcher in launchers]
    finally:
        for launcher in launchers:
            if launcher.poll() is None:
                os.killpg(launcher.pid, signal.SIGKILL)
    return codes, [(folder / f"host{host}.log").read_text() for host in range(len(launchers))]


@pytest.fixture(scope="module")
def alone(tmp_path_factory, data):
    """The model_dir of the same run on two ranks of one host."""
    folder = tmp_path_factory.mktemp("alone")
    assert main(["fit", str(write_params(folder, data)), TWO]) == 0
    return folder / "run"


def exact(model_dir):
    """The history without norms of all weights, which are added up in another order."""
    return [{k: v for k, v in record.items() if k != "weight_norm"} for record in history(model_dir)]


def test_two_hosts_give_the_bits_of_two_ranks_of_one_host_and_checkpoints_for_any(
    headwater, params, alone, tmp_path
):
    with Hosts(2) as hosts:
        codes, logs = wait(fit(hosts, params, tmp_path / "hosts"), tmp_path / "hosts")
    assert codes == [0, 0], logs
    run = tmp_path / "hosts/run"
    assert exact(run) == exact(alone)
    norms = [[r["weight_norm"] for r in history(folder) if r["weight_norm"]] for folder in (run, alone)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-9)
    for step in (3, 6):
        assert_same_checkpoint(run / f"checkpoint_{step}", alone / f"checkpoint_{step}")
    assert (
        headwater("fit", params, f"--trainer.init.model_dir={run}", "--trainer.init.loop.max_steps=7")[0] == 0
    )
    assert history(run)[-1]["step"] == 7


def test_a_host_that_is_cut_off_ends_the_run_which_goes_on_to_the_same_bits(params, alone, tmp_path):
    folder = tmp_path / "hosts"
    with Hosts(2) as hosts:
        launchers = fit(
            hosts, params, folder, ENDLESS, "--trainer.init.backend.cluster_config.rank_timeout_s=10"
        )
        wait_for(folder / "run/checkpoint_3/manifest.json")
        hosts.cut(1)
        codes, logs = wait(launchers, folder)
        assert 0 not in codes
        assert "cannot reach" in logs[0], logs[0]
        assert "(node 1)" in logs[0], logs[0]
        hosts.restore(1)
        last = 3 * (len(list((folder / "run").glob("checkpoint_*"))) + 1)
        codes, logs = wait(fit(hosts, params, folder, f"--trainer.init.loop.max_steps={last}"), folder)
    assert codes == [0, 0], logs
    assert losses(folder / "run")[:6] == losses(alone)


def test_a_rank_that_stands_still_for_a_while_changes_nothing(params, alone, tmp_path):
    folder = tmp_path / "hosts"
    with Hosts(2) as hosts:
        launchers = fit(hosts, params, folder)
        wait_for(folder / "run/history.jsonl")
        (rank,) = ranks_of(launchers[1])
        os.kill(rank, signal.SIGSTOP)
        time.sleep(2)
        os.kill(rank, signal.SIGCONT)
        codes, logs = wait(launchers, folder)
    assert codes == [0, 0], logs
    assert exact(folder / "run") == exact(alone)
