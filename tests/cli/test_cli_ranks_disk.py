"""Several compute ranks whose weights are on disk: the numbers of the memory tier, and checkpoints."""

import os
import subprocess
import sys

import pytest
from run_samples import assert_same_checkpoint, history, losses, model_dir, write_params

from headwater.cli.main import main

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="this machine has one core")

TWO = "--num_csx=2"
LAYERS = "--trainer.init.model.num_hidden_layers=6"
SLABS = "--trainer.init.backend.num_slabs=4"


def on_disk(folder):
    backend = "--trainer.init.backend"
    return [LAYERS, SLABS, f"{backend}.tier=disk", f"{backend}.disk={{path: {folder}}}"]


@pytest.fixture(scope="module")
def two(tmp_path_factory, data):
    """The model_dir of an undisturbed run on two ranks with the disk tier."""
    folder = tmp_path_factory.mktemp("two")
    assert main(["fit", str(write_params(folder, data)), TWO, *on_disk(folder / "disk")]) == 0
    assert not list((folder / "disk").iterdir())
    return folder / "run"


def test_the_disk_tier_matches_the_memory_tier_and_is_reproducible(headwater, params, two, tmp_path):
    assert headwater("fit", params, TWO, LAYERS, SLABS, model_dir(tmp_path / "memory"))[0] == 0
    assert headwater("fit", params, TWO, *on_disk(tmp_path / "disk"), model_dir(tmp_path / "again"))[0] == 0
    mixed = [*on_disk(tmp_path / "disk"), "--trainer.init.backend.stages_in_memory=3"]
    assert headwater("fit", params, TWO, *mixed, model_dir(tmp_path / "mixed"))[0] == 0
    for other in (tmp_path / "memory", tmp_path / "again", tmp_path / "mixed"):
        assert history(two) == history(other)
        assert_same_checkpoint(two / "checkpoint_6", other / "checkpoint_6")


@pytest.mark.parametrize("begins_on_disk", [True, False])
def test_checkpoints_resume_across_tiers_and_rank_counts(headwater, params, two, begins_on_disk, tmp_path):
    disk, memory = [TWO, *on_disk(tmp_path / "disk")], ["--trainer.init.backend.micro_batch_size=4", LAYERS]
    before, after = (disk, memory) if begins_on_disk else (memory, disk)
    other = model_dir(tmp_path / "other")
    assert headwater("fit", params, *before, other, "--trainer.init.loop.max_steps=3")[0] == 0
    code, output, error = headwater("fit", params, *after, other)
    assert code == 0, output + error
    assert losses(tmp_path / "other")[-1] == pytest.approx(losses(two)[-1], rel=1e-5)


def test_slabs_too_few_for_both_ranks_are_refused(params, tmp_path):
    keys = [TWO, *on_disk(tmp_path / "disk"), "--trainer.init.backend.num_slabs=2"]
    command = [sys.executable, "-m", "headwater", "fit", str(params), *keys]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode != 0
    assert "write 4 or more" in " ".join((done.stdout + done.stderr).split())
    assert not (tmp_path / "run/history.jsonl").exists()
