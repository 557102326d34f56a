"""Ranks on several hosts, each in a separate network namespace: bit-identical results, and a broken link."""

import os
import signal
import time

import pytest
import yaml
from benchmarks.namespaces import Hosts, available
from run_samples import assert_same_checkpoint, history, losses, model_dir, ranks_of, wait_for

pytestmark = pytest.mark.skipif(available() is not None, reason=str(available()))

TWO = "--num_csx=2"
ENDLESS = "--trainer.init.loop.max_steps=100000"


def fit(hosts, params, folder, *options, ranks=1):
    """Start a run on all hosts; it works in `folder / "run"`."""
    folder.mkdir(exist_ok=True)
    arguments = ["fit", str(params), model_dir(folder / "run"), TWO, *options]
    return hosts.start_ranks(arguments, ranks, folder, {**os.environ, "OMP_NUM_THREADS": "1"})


def wait(launchers, folder):
    """The exit codes of a run, and what its hosts have printed."""
    return Hosts.wait(launchers, folder, timeout_s=300)


def exact(model_dir):
    """The history without norms of all weights, which are added up in another order."""
    return [{k: v for k, v in record.items() if k != "weight_norm"} for record in history(model_dir)]


def test_two_hosts_are_bit_identical_to_two_ranks_and_share_checkpoints(headwater, params, alone, tmp_path):
    with Hosts(2) as hosts:
        codes, logs = wait(fit(hosts, params, tmp_path / "hosts"), tmp_path / "hosts")
    assert codes == [0, 0], logs
    run = tmp_path / "hosts/run"
    assert exact(run) == exact(alone)
    norms = [[r["weight_norm"] for r in history(folder) if r["weight_norm"]] for folder in (run, alone)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-9)
    for step in (3, 6):
        assert_same_checkpoint(run / f"checkpoint_{step}", alone / f"checkpoint_{step}")
    assert headwater("fit", params, model_dir(run), "--trainer.init.loop.max_steps=7")[0] == 0
    assert history(run)[-1]["step"] == 7


@pytest.mark.parametrize("every", [3, 1], ids=["between checkpoints", "while one is written"])
def test_a_run_that_lost_a_host_resumes_bit_identically(params, alone, tmp_path, every):
    folder, saves = tmp_path / "hosts", f"--trainer.init.checkpoint.steps={every}"
    # Longer than a busy machine may pause a rank before the host is lost.
    patience = "--trainer.init.backend.cluster_config.rank_timeout_s=20"
    with Hosts(2) as hosts:
        launchers = fit(hosts, params, folder, ENDLESS, patience, saves)
        wait_for(folder / "run/checkpoint_3/manifest.json")
        hosts.cut(1)
        codes, logs = wait(launchers, folder)
        assert 0 not in codes
        assert "cannot reach" in logs[0], logs[0]
        assert "(node 1)" in logs[0], logs[0]
        hosts.restore(1)
        last = max(6, every * (len(list((folder / "run").glob("checkpoint_*"))) + 1))
        codes, logs = wait(fit(hosts, params, folder, f"--trainer.init.loop.max_steps={last}", saves), folder)
    assert codes == [0, 0], logs
    assert losses(folder / "run")[:6] == losses(alone)


def test_a_rank_that_pauses_for_a_while_changes_nothing(params, alone, tmp_path):
    folder = tmp_path / "hosts"
    with Hosts(2) as hosts:
        launchers = fit(hosts, params, folder, ENDLESS)
        wait_for(folder / "run/history.jsonl")
        (rank,) = ranks_of(launchers[1])
        os.kill(rank, signal.SIGSTOP)
        time.sleep(2)
        os.kill(rank, signal.SIGCONT)
        wait_for(folder / "run/checkpoint_6/manifest.json")
        for each in ranks_of(launchers[0]):
            os.kill(each, signal.SIGTERM)
        codes, logs = wait(launchers, folder)
    assert "stopped after step" in logs[0], (codes, logs)
    undisturbed = exact(alone)
    assert exact(folder / "run")[: len(undisturbed)] == undisturbed


def on_disk(folder):
    """Options for weights on the disks of the hosts."""
    return ("--trainer.init.backend.tier=disk", f"--disk={folder}/disk")


def test_two_hosts_with_disks_give_the_same_bits_even_after_a_rank_was_killed(
    headwater, params, alone, tmp_path
):
    folder = tmp_path / "hosts"
    with Hosts(2) as hosts:
        launchers = fit(hosts, params, folder, ENDLESS, *on_disk(tmp_path))
        wait_for(folder / "run/checkpoint_3/manifest.json")
        os.kill(ranks_of(launchers[1])[0], signal.SIGKILL)
        codes, logs = wait(launchers, folder)
        assert 0 not in codes, logs
        last = 3 * (len(list((folder / "run").glob("checkpoint_*"))) + 1)
        steps = f"--trainer.init.loop.max_steps={last}"
        codes, logs = wait(fit(hosts, params, folder, *on_disk(tmp_path), steps), folder)
    assert codes == [0, 0], logs
    assert losses(folder / "run")[:6] == losses(alone)
    assert_same_checkpoint(folder / "run/checkpoint_3", alone / "checkpoint_3")
    assert not list((tmp_path / "disk").iterdir())
    goes_on = (model_dir(folder / "run"), f"--trainer.init.loop.max_steps={last + 1}")
    assert headwater("fit", params, *goes_on)[0] == 0
    assert history(folder / "run")[-1]["step"] == last + 1


def test_a_host_of_store_ranks_keeps_masters_on_its_disk(params, alone, tmp_path):
    with Hosts(2) as hosts:
        launchers = fit(hosts, params, tmp_path / "hosts", "--num_memx=2", *on_disk(tmp_path), ranks=2)
        codes, logs = wait(launchers, tmp_path / "hosts")
    assert codes == [0, 0], logs
    assert exact(tmp_path / "hosts/run") == exact(alone)
    assert_same_checkpoint(tmp_path / "hosts/run/checkpoint_6", alone / "checkpoint_6")


def test_masks_of_hosts_change_as_those_of_one_host(headwater, params, tmp_path):
    tree = yaml.safe_load(params.read_text())
    tree["trainer"]["init"]["sparsity"] = {
        "sparsity": 0.75,
        "algorithm": "rigl",
        "drop_fraction": 0.3,
        "update": {"freq": 2},
    }
    params.write_text(yaml.safe_dump(tree))
    with Hosts(2) as hosts:
        codes, logs = wait(fit(hosts, params, tmp_path / "hosts"), tmp_path / "hosts")
    assert codes == [0, 0], logs
    assert headwater("fit", params, TWO, model_dir(tmp_path / "one"))[0] == 0
    assert losses(tmp_path / "hosts/run") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    goes_on = (model_dir(tmp_path / "hosts/run"), "--trainer.init.loop.max_steps=7")
    assert headwater("fit", params, *goes_on)[0] == 0
    assert history(tmp_path / "hosts/run")[-1]["step"] == 7
