"""A run that is killed at any instant resumes from its last complete checkpoint to the same bits."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoint_runs import LARGE, assert_same, load_checkpoint, make_store, train
from killed_run import HISTORY_WRITTEN, NUM_KILLS, NUM_STEPS

from headwater.trainer.checkpoint import CheckpointManager
from headwater.trainer.model_dir_lock import ModelDirLock

SCRIPT = Path(__file__).with_name("killed_run.py")


@pytest.mark.parametrize("tier", ["memory", "disk", "memory in backward", "disk in backward"])
def test_killed_run_resumes_to_the_same_bits(tmp_path, tier):
    command = [sys.executable, str(SCRIPT), str(tmp_path), tier]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    outcomes = json.loads(finished.stdout)
    assert len(outcomes) == NUM_KILLS + 1
    (half_written,) = (outcome for outcome in outcomes if outcome["instant"] == HISTORY_WRITTEN)
    assert "history.jsonl.partial" in half_written["left_at_once"]
    for outcome in outcomes:
        assert outcome["killed"] == -signal.SIGKILL, outcome
        assert outcome["resumed"] == 0, (outcome, finished.stderr)
        assert outcome["same"], outcome
        last_two = [f"checkpoint_{NUM_STEPS - 1}", f"checkpoint_{NUM_STEPS}"]
        assert outcome["left"] == [*last_two, "history.jsonl", "run.lock"], outcome
        assert outcome["history"] == outcome["undisturbed_history"], outcome
    assert (
        len({tuple(outcome["resumed_from"]) for outcome in outcomes}) >= 4
    )  # kills were spread over the run


def test_a_kill_within_a_write_behind_leaves_the_checkpoint_before(tmp_path):
    """The threads that write large parameters are killed with the process."""
    command = [sys.executable, str(SCRIPT.with_name("killed_save.py")), str(tmp_path), "4"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert (tmp_path / "checkpoint_2.partial").is_dir()
    manager = CheckpointManager(tmp_path)
    with ModelDirLock(tmp_path):
        assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["checkpoint_1"]
        loaded, expected = make_store(shapes=LARGE), make_store(shapes=LARGE)
        load_checkpoint(loaded, manager.newest_whole())
    train(expected, 0)
    assert_same(loaded, expected)
