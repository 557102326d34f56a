"""Failures of several ranks while they write checkpoints; the run then resumes bit-identically."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from run_samples import assert_same_checkpoint, losses, ranks_of, wait_for, write_params

from headwater.cli.main import main
from headwater.trainer.history import read_history

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="this machine has one core")

STEPS = 12
ALWAYS_SAVING = ["--num_csx=2", "--checkpoint_steps=1", "--trainer.init.model.num_hidden_layers=6"]
"""There is hardly a moment in which no checkpoint is written."""


def memory(folder):
    return ALWAYS_SAVING


def disk(folder):
    backend = "--trainer.init.backend"
    tier = [f"{backend}.num_slabs=4", f"{backend}.tier=disk", f"{backend}.disk={{path: {folder}/disk}}"]
    return [*ALWAYS_SAVING, *tier]


def store_rank(folder):
    return [*ALWAYS_SAVING, "--num_memx=1"]


def store_rank_with_disk(folder):
    return [*disk(folder), "--num_memx=1"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, data):
    """The model_dir of a run to which nothing happens; where its weights are changes no bit."""
    folder = tmp_path_factory.mktemp("undisturbed")
    assert main(["fit", str(write_params(folder, data)), *memory(folder), f"--max_steps={STEPS}"]) == 0
    return folder / "run"


def with_steps(undisturbed, steps):
    """Return the undisturbed run after it has at least this many steps.

    A run that is disturbed gets further than `STEPS` if the machine pauses this process.
    """
    if len(losses(undisturbed)) < steps:
        params = undisturbed.with_suffix(".yaml")
        assert main(["fit", str(params), *memory(undisturbed), f"--max_steps={steps}"]) == 0
    return undisturbed


@contextlib.contextmanager
def running(params, options, model_dir):
    """A run without end that is writing a checkpoint now, and has written some."""
    words = [*options, "--max_steps=1000000", f"--trainer.init.model_dir={model_dir}"]
    command = [sys.executable, "-m", "headwater", "fit", str(params), *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as launcher:
        wait_for(model_dir / "checkpoint_2/manifest.json")
        while not list(model_dir.glob("*.partial")):
            assert launcher.poll() is None, launcher.communicate()
            time.sleep(0.001)
        yield launcher


def assert_goes_on(headwater, params, options, model_dir, undisturbed):
    """Check that the same command resumes the run bit-identically; a few steps more show that."""
    # A full disk may have cut off the last line.
    before = sum(record["kind"] == "train" for record in read_history(model_dir / "history.jsonl"))
    assert before >= 2, "it was disturbed in between"
    end = before + 4
    undisturbed = with_steps(undisturbed, end)
    code, output, error = headwater(
        "fit", params, *options, f"--max_steps={end}", f"--trainer.init.model_dir={model_dir}"
    )
    assert code == 0, output + error
    assert losses(model_dir) == losses(undisturbed)[:end]
    assert_same_checkpoint(model_dir / f"checkpoint_{end}", undisturbed / f"checkpoint_{end}")


@pytest.mark.parametrize(
    ("kind", "rank"),
    [(memory, 0), (memory, 1), (disk, 0), (disk, 1), (store_rank, 2), (store_rank_with_disk, 2)],
)
def test_a_rank_is_killed(headwater, params, kind, rank, undisturbed, tmp_path):
    options, run = kind(tmp_path), tmp_path / "run"
    with running(params, options, run) as launcher:
        os.kill(ranks_of(launcher)[rank], signal.SIGKILL)
        output, _ = launcher.communicate(timeout=120)
    assert launcher.returncode != 0
    assert f"rank {rank}" in output and output.count("error:") == 1, output
    assert_goes_on(headwater, params, options, run, undisturbed)


def stop(launcher):
    """End a run after its step, with a checkpoint; return its output."""
    launcher.send_signal(signal.SIGTERM)
    output, _ = launcher.communicate(timeout=120)
    assert launcher.returncode == 130, output
    return output


def wait_for_step(launcher, model_dir, step):
    """Block until a run has computed a step."""
    while len(losses(model_dir)) < step:
        assert launcher.poll() is None, launcher.communicate()
        time.sleep(0.01)


def wait_for_restart(launcher, before):
    """Block until other processes are the ranks of a run."""
    while len(now := ranks_of(launcher)) != len(before) or {*now} & {*before}:
        assert launcher.poll() is None, launcher.communicate()
        time.sleep(0.01)


@pytest.mark.parametrize(("num_csx", "killed"), [(1, [0]), (2, [1, 0])])
def test_a_run_restarts_after_a_rank_died(headwater, params, undisturbed, num_csx, killed, tmp_path):
    run, number = tmp_path / "run", f"--num_csx={num_csx}"
    options = [*ALWAYS_SAVING, number, "--trainer.init.backend.micro_batch_size=4", "--max_restarts=2"]
    with running(params, options, run) as launcher:
        for rank in killed:
            ranks = ranks_of(launcher)
            os.kill(ranks[rank], signal.SIGKILL)
            wait_for_restart(launcher, ranks)
            wait_for_step(launcher, run, len(losses(run)) + 2)
        output = stop(launcher)
    for number, rank in enumerate(killed, start=1):
        assert f"rank {rank}" in output and f"({number} of 2)" in output
    assert "error:" not in output
    found = losses(run)
    expected = losses(with_steps(undisturbed, len(found)))[: len(found)]
    assert found == pytest.approx(expected, rel=0 if num_csx == 2 else 1e-5)


def test_a_reproducible_error_is_not_retried(params, tmp_path):
    words = ["--num_csx=2", "--max_restarts=5", "--trainer.fit.train_dataloader.data_dir=nowhere"]
    command = [sys.executable, "-m", "headwater", "fit", str(params), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode != 0
    assert "nowhere" in done.stderr and "restarting" not in done.stderr, done.stderr


def test_the_launcher_is_killed(headwater, params, undisturbed, tmp_path):
    options, run = memory(tmp_path), tmp_path / "run"
    with running(params, options, run) as launcher:
        ranks = [psutil.Process(rank) for rank in ranks_of(launcher)]
        launcher.kill()
    psutil.wait_procs(ranks, timeout=60)
    assert not any(rank.is_running() for rank in ranks), "ranks end with their launcher"
    assert_goes_on(headwater, params, options, run, undisturbed)


def test_a_rank_pauses_for_a_while(params, undisturbed, tmp_path):
    run = tmp_path / "run"
    with running(params, memory(tmp_path), run) as launcher:
        rank = psutil.Process(ranks_of(launcher)[1])
        rank.suspend()
        time.sleep(3)
        rank.resume()
        wait_for_step(launcher, run, len(losses(run)) + 2)
        stop(launcher)
    found = losses(run)
    undisturbed = with_steps(undisturbed, len(found))
    assert found == losses(undisturbed)[: len(found)]
    assert_same_checkpoint(run / f"checkpoint_{len(found)}", undisturbed / f"checkpoint_{len(found)}")


@contextlib.contextmanager
def small_disk(folder, size):
    """Mount a file system of a given size, in bytes, at a folder."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize("full", ["checkpoints", "store"])
def test_a_disk_is_full(headwater, params, full, undisturbed, tmp_path):
    options, run = disk(tmp_path), tmp_path / "run"
    folder = run if full == "checkpoints" else tmp_path / "disk"
    with small_disk(folder, 64 << 20):
        with running(params, options, run) as launcher:
            fill = folder / "fill"
            with fill.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while file.write(bytes(4096)):  # until there is no room
                    pass
            if full == "store":  # what it needs there it has taken at the start
                steps = len(losses(run))
                wait_for(run / f"checkpoint_{steps + 3}/manifest.json")
                launcher.send_signal(signal.SIGTERM)
            output, _ = launcher.communicate(timeout=120)
        fill.unlink()
        if full == "store":
            assert launcher.returncode == 130, output
        else:
            assert launcher.returncode != 0 and output.count("error:") == 1, output
            assert str(run) in output and "space" in output, output
        assert_goes_on(headwater, params, options, run, undisturbed)
