"""Store ranks, which do not compute: the bits of runs without them, for any placement."""

import os

import pytest
from benchmarks.namespaces import Hosts, available
from run_samples import assert_same_checkpoint, history, losses, model_dir

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="this machine has one core")

COMPUTE, STORE = "--num_csx=2", "--num_memx=1"


def test_store_ranks_are_bit_identical(headwater, params, two, tmp_path):
    code, output, error = headwater("fit", params, COMPUTE, STORE, model_dir(tmp_path))
    assert code == 0, output + error
    assert history(tmp_path) == history(two)
    assert_same_checkpoint(tmp_path / "checkpoint_6", two / "checkpoint_6")


@pytest.mark.parametrize("placements", [([STORE], ["--num_memx=2"]), ([], [STORE]), ([STORE], [])])
def test_a_checkpoint_resumes_with_another_placement(headwater, params, two, placements, tmp_path):
    for placement, steps in zip(placements, (3, 6), strict=True):
        options = (*placement, model_dir(tmp_path), f"--trainer.init.loop.max_steps={steps}")
        assert headwater("fit", params, COMPUTE, *options)[0] == 0
    assert losses(tmp_path) == losses(two)
    assert_same_checkpoint(tmp_path / "checkpoint_6", two / "checkpoint_6")


def test_one_rank_computes_and_one_stores(headwater, params, tmp_path):
    runs = [tmp_path / "alone", tmp_path / "store"]
    assert headwater("fit", params, model_dir(runs[0]))[0] == 0
    assert headwater("fit", params, STORE, model_dir(runs[1]))[0] == 0
    assert losses(runs[0]) == losses(runs[1])


def test_a_non_finite_loss_is_reported_and_the_previous_step_saved(headwater, params, tmp_path):
    """Only the computing rank knows the first non-finite place, and must tell the store rank in time."""
    steep = "--trainer.init.schedulers=[{ConstantLR: {learning_rate: 1e30}}]"
    code, output, error = headwater("fit", params, STORE, model_dir(tmp_path), steep)
    assert code != 0, output
    assert "the loss of step" in error and error.count("error:") == 1, error
    assert (tmp_path / f"checkpoint_{len(losses(tmp_path))}/manifest.json").is_file()


@pytest.mark.skipif(available() is not None, reason=str(available()))
def test_a_host_of_store_ranks_is_bit_identical(params, two, tmp_path):
    arguments = ["fit", str(params), COMPUTE, "--num_memx=2", model_dir(tmp_path / "run")]
    with Hosts(2) as hosts:
        launchers = hosts.start_ranks(arguments, 2, tmp_path, {**os.environ, "OMP_NUM_THREADS": "1"})
        codes = [launcher.wait(120) for launcher in launchers]
    assert codes == [0, 0], [(tmp_path / f"host{host}.log").read_text() for host in range(2)]
    assert losses(tmp_path / "run") == losses(two)
    assert_same_checkpoint(tmp_path / "run/checkpoint_6", two / "checkpoint_6")


@pytest.mark.parametrize("store", [STORE, "--num_memx=2"])
def test_store_ranks_on_disk_are_bit_identical_and_resume_in_memory(headwater, params, two, store, tmp_path):
    disk = (f"--disk={tmp_path}/disk", "--trainer.init.backend.tier=disk")
    for options in ((store, *disk, "--trainer.init.loop.max_steps=3"), (STORE,), (store, *disk)):
        code, output, error = headwater("fit", params, COMPUTE, model_dir(tmp_path / "run"), *options)
        assert code == 0, output + error
    assert losses(tmp_path / "run") == losses(two)
    assert_same_checkpoint(tmp_path / "run/checkpoint_6", two / "checkpoint_6")
    assert not list((tmp_path / "disk").iterdir())
