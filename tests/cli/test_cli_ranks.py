"""Several compute ranks on this machine: the same numbers, checkpoints for any number of them, and a stop."""

import os
import signal
import subprocess
import sys

import pytest
import torch
from run_samples import assert_same_checkpoint, history, losses, model_dir, wait_for

from headwater.trainer.pretrained import checkpoint_weights

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="this machine has one core")

TWO = "--num_csx=2"
ONE = "--trainer.init.backend.micro_batch_size=4"
"""One rank that computes what two do: a batch of 8 in two parts."""


def test_two_ranks_match_one_rank_and_are_reproducible(headwater, params, two, tmp_path):
    assert headwater("fit", params, ONE, model_dir(tmp_path / "one"))[0] == 0
    assert losses(two) == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    tokens = [[record["tokens"] for record in history(run)] for run in (two, tmp_path / "one")]
    assert tokens[0] == tokens[1]
    ours, theirs = (dict(checkpoint_weights(run / "checkpoint_6")) for run in (two, tmp_path / "one"))
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-3, atol=1e-5)

    assert headwater("fit", params, TWO, model_dir(tmp_path / "again"))[0] == 0
    assert history(two) == history(tmp_path / "again")
    assert_same_checkpoint(two / "checkpoint_6", tmp_path / "again/checkpoint_6")


@pytest.mark.parametrize(("before", "after"), [(TWO, ONE), (ONE, TWO)])
def test_a_checkpoint_resumes_with_another_number_of_ranks(headwater, params, two, before, after, tmp_path):
    other = model_dir(tmp_path / "other")
    assert headwater("fit", params, before, other, "--trainer.init.loop.max_steps=3")[0] == 0
    code, output, error = headwater("fit", params, after, other)
    assert code == 0, output + error
    assert losses(tmp_path / "other")[-1] == pytest.approx(losses(two)[-1], rel=1e-5)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_finishes_its_step_and_resumes(params, two, headwater, tmp_path, number):
    folder = tmp_path / "other"
    command = [sys.executable, "-m", "headwater", "fit", str(params), TWO, model_dir(folder)]
    endless = [*command, "--trainer.init.loop.max_steps=100000"]
    with subprocess.Popen(
        endless, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as launcher:
        wait_for(folder / "checkpoint_3" / "manifest.json")
        os.killpg(launcher.pid, number)  # as a terminal does it
        output, _ = launcher.communicate(timeout=100)
    assert launcher.returncode == 130, output
    assert "stopped after step" in output
    assert output.count("stopping after this step") == 1
    code, output, error = headwater("fit", params, TWO, model_dir(folder), "--num_steps=1")
    assert code == 0, output + error


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["--num_csx=4096"], "(cores of this machine), got 4096"),
        ([TWO, "--trainer.fit.train_dataloader.batch_size=7"], "write 6 or 8"),
    ],
)
def test_invalid_combinations_are_refused(params, keys, message, tmp_path):
    command = [sys.executable, "-m", "headwater", "fit", str(params), *keys]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode != 0
    assert message in " ".join((done.stdout + done.stderr).split())
    assert (done.stdout + done.stderr).count("error:") == 1, "every rank says the same"
    assert not (tmp_path / "run/history.jsonl").exists()
