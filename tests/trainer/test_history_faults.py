"""The history of a run after a kill, a full disk or a loss of power."""

import logging
import os
from pathlib import Path

import pytest
from test_callbacks import PLAN, run, step

from headwater.core.errors import DiskFullError
from headwater.trainer.callback import FitStart
from headwater.trainer.history import History, read_history, read_last_steps
from headwater.trainer.model_dir_lock import ModelDirLock


def start_of(number):
    """Return the event of a run that resumes at a step."""
    return FitStart(number, 4, PLAN)


def steps(path):
    return [record["step"] for record in read_history(path) if record["kind"] == "train"]


@pytest.mark.parametrize("name", ["history.partial", "history.jsonl.partial", "params.yaml.partial"])
def test_a_file_left_half_written_does_not_block_a_run(tmp_path, name):
    left = tmp_path / "run" / name
    left.parent.mkdir()
    left.write_text('{"kind"')
    with ModelDirLock(left.parent):
        assert not left.exists()


@pytest.mark.parametrize(
    "damage",
    [b"\0" * 4096, b"\0" * 10 + b"\n" + b"\0" * 7, b'{"kind": "train", "st\0\0\0\0\n', b"[" * 9999 + b"\n"],
)
def test_damaged_lines_are_left_out_with_a_warning(tmp_path, caplog, damage):
    path = tmp_path / "history.jsonl"
    run(History(path), step(1), step(2))
    whole = path.read_bytes()
    path.write_bytes(whole + damage)
    with caplog.at_level(logging.WARNING):
        assert steps(path) == [1, 2]
    assert "damaged lines are left out" in caplog.text
    assert [last.step for last in read_last_steps(path, 9)] == [1, 2]
    run(History(path), step(3), start=2)
    assert steps(path) == [1, 2, 3]
    assert b"\0" not in path.read_bytes()


def test_a_damaged_line_does_not_affect_other_lines(tmp_path):
    path = tmp_path / "history.jsonl"
    run(History(path), step(1), step(2), step(3))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"\0" * len(lines[1]) + b"\n" + lines[2])
    assert steps(path) == [1, 3]


def test_a_failed_rename_leaves_the_old_history(tmp_path, monkeypatch):
    path = tmp_path / "history.jsonl"
    run(History(path), step(1), step(2))
    whole = path.read_bytes()

    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(DiskFullError):
        patch.setattr(os, "rename", full)
        patch.setattr(os, "replace", full)
        History(path).on_fit_start(start_of(1))
    assert path.read_bytes() == whole
    assert [entry.name for entry in tmp_path.iterdir()] == ["history.jsonl"]
    run(History(path), step(2, 7.0), start=1)
    assert steps(path) == [1, 2]


def test_a_history_that_needs_no_change_is_not_written_again(tmp_path):
    path = tmp_path / "history.jsonl"
    run(History(path), step(1), step(2))
    before = path.stat()
    history = History(path)
    history.on_fit_start(start_of(2))
    history.on_fit_end()
    assert path.stat().st_ino == before.st_ino


def test_a_checkpoint_syncs_the_history_to_disk(tmp_path, monkeypatch):
    synced = []
    history = History(tmp_path / "history.jsonl")
    history.on_fit_start(start_of(0))
    history.on_step_end(step(1))
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(Path(f"/proc/self/fd/{handle}").readlink()))
    history.on_checkpoint(1, tmp_path / "checkpoint_1")
    assert synced == [tmp_path / "history.jsonl"]
    history.on_fit_end()
    assert len(synced) == 2
