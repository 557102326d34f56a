"""Checkpoints of `StreamedTrainer` get their names when they are complete."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from places import backend
from trainers import TRAIN, VALIDATION, gpt2, trainer_of
from transformers import Trainer, TrainerCallback

from headwater.integrations.transformers import StreamedTrainer

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

SCRIPT = Path(__file__).with_name("killed_trainer.py")
EVERY_2 = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
FIRST_IS_BEST = {"metric_for_best_model": "loss", "greater_is_better": True}


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def names_in(folder):
    return sorted(path.name for path in Path(folder).iterdir())


class Saves(TrainerCallback):
    """Notes the checkpoints, their files, and the best one at each save."""

    def __init__(self):
        self.seen = []

    def on_save(self, args, state, control, **kwargs):
        folder = Path(args.output_dir)
        written = json.loads((folder / f"checkpoint-{state.global_step}" / "trainer_state.json").read_text())
        files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
        bests = [best and str(Path(best).relative_to(folder)) for best in
                 (state.best_model_checkpoint, written["best_model_checkpoint"])]  # fmt: skip
        self.seen.append((files, bests))


def train(place, folder, **options):
    saves = Saves()
    trainer = trainer_of(place, folder, **EVERY_2, **options)
    trainer.add_callback(saves)
    trainer.train()
    return trainer, saves.seen


def test_a_killed_run_resumes_from_a_complete_checkpoint_to_the_same_bits(tmp_path):
    done = subprocess.run(
        [sys.executable, SCRIPT, tmp_path],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    (complete,) = {tuple(files) for files in result["undisturbed"].values()}
    for outcome in result["outcomes"]:
        assert outcome["killed"] == -signal.SIGKILL, outcome
        assert all(tuple(files) == complete for files in outcome["left"].values()), outcome
        assert outcome["resumed"] == 0, (outcome, done.stderr)
        assert outcome["same"], outcome
        assert re.fullmatch("checkpoint-2 checkpoint-[67]", " ".join(outcome["left_at_end"])), outcome


@pytest.mark.parametrize(
    "options",
    [
        FIRST_IS_BEST | {"save_total_limit": 2},
        FIRST_IS_BEST | {"save_total_limit": 1, "load_best_model_at_end": True},
        {"save_total_limit": 1, "save_only_model": True},
    ],
    ids=["the best is kept", "the best is loaded", "only the model"],
)
def test_checkpoints_at_each_save_are_those_of_the_plain_trainer(options, tmp_path):
    (plain, expected), (ours, seen) = (
        train(place, tmp_path / name, **options)
        for name, place in (("plain", None), ("ours", backend("slabs", tmp_path)))
    )
    assert len(seen) == 4 and seen == expected
    assert names_in(tmp_path / "ours") == names_in(tmp_path / "plain")
    assert ours.state.best_global_step == plain.state.best_global_step


def test_a_save_that_fails_leaves_no_checkpoint(tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError("no room")

    monkeypatch.setattr(Trainer, "_save_rng_state", fail)
    announced = tmp_path / "ours" / "checkpoint-2"  # as the Trainer announces a save after SIGTERM
    announced.mkdir(parents=True)
    (announced / "checkpoint-is-incomplete.txt").touch()
    with pytest.raises(OSError, match="no room"):
        train(backend("slabs", tmp_path), tmp_path / "ours")
    assert names_in(tmp_path / "ours") == []


def test_files_that_a_subclass_writes_before_and_after_the_save_are_kept(tmp_path):
    class Mine(StreamedTrainer):
        def _save_checkpoint(self, model, trial):
            folder = Path(self.args.output_dir) / "checkpoint-2"
            folder.mkdir(parents=True)
            (folder / "before").touch()
            super()._save_checkpoint(model, trial)
            (folder / "after").touch()

    plain = trainer_of(None, tmp_path / "ours", max_steps=2, **EVERY_2)
    trainer = Mine(model=gpt2(), args=plain.args, train_dataset=TRAIN, eval_dataset=VALIDATION)
    trainer.train()
    assert {"before", "after", "trainer_state.json"} <= set(names_in(tmp_path / "ours" / "checkpoint-2"))


def test_a_checkpoint_of_an_earlier_run_is_replaced(tmp_path):
    place = backend("slabs", tmp_path)
    train(place, tmp_path / "ours", max_steps=2, seed=1)
    earlier = torch.load(tmp_path / "ours" / "checkpoint-2" / "scheduler.pt")
    (tmp_path / "ours" / "checkpoint-2" / "extra").touch()
    train(place, tmp_path / "ours", max_steps=2, learning_rate=0.5)
    assert torch.load(tmp_path / "ours" / "checkpoint-2" / "scheduler.pt") != earlier
    assert not (tmp_path / "ours" / "checkpoint-2" / "extra").exists()
    assert names_in(tmp_path / "ours") == ["checkpoint-2"]


def test_a_checkpoint_is_uploaded_under_its_own_name(tmp_path, monkeypatch):
    uploads = []
    monkeypatch.setattr(
        Trainer, "_push_from_checkpoint", lambda _, folder: uploads.append((folder, names_in(folder)))
    )
    trainer = trainer_of(backend("slabs", tmp_path), tmp_path / "ours", max_steps=2, **EVERY_2)
    monkeypatch.setattr(trainer.args, "push_to_hub", True)
    monkeypatch.setattr(trainer, "_finish_current_push", lambda: None)
    trainer.train()
    ((folder, files),) = uploads
    assert folder == str(tmp_path / "ours" / "checkpoint-2")
    assert "trainer_state.json" in files
