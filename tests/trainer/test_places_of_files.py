"""Paths of a run's files at which something else exists."""

import errno
import logging
import os

import pytest
from test_callbacks import run, step

from headwater.core.errors import ConfigError, DiskFullError, RunError, StoreError
from headwater.core.files import check_place, disk_errors, replace_file
from headwater.store.checkpoint_folder import publish
from headwater.trainer.callback import FitStart
from headwater.trainer.checkpoint_inspection import complete_checkpoints
from headwater.trainer.history import History
from headwater.trainer.loss_curve import LossCurve
from headwater.trainer.model_dir_lock import ModelDirLock
from headwater.trainer.run_dir import RunDir
from headwater.trainer.tensorboard import TensorBoard
from read_only import another_user

FILES = (
    "params.yaml",
    "plan.txt",
    "history.jsonl",
    "loss_curve.png",
    "data_statistics.json",
    "tokenizer.json",
)


def put(kind, path):
    """Put something that is not a file at `path`; return its name in error messages."""
    if kind == "folder":
        path.mkdir(parents=True)
        return "found a folder"
    path.parent.mkdir(exist_ok=True)
    if kind == "link":
        path.symlink_to(path.parent / "missing" / "file")
        return "which does not exist"
    os.mkfifo(path)
    return "found a special file"


@pytest.mark.parametrize("name", FILES)
def test_a_folder_at_the_path_of_a_file_is_reported_before_the_run(tmp_path, name):
    (tmp_path / name).mkdir()
    with pytest.raises(RunError, match="expected a file or nothing, found a folder") as caught:
        RunDir(tmp_path).check()
    assert caught.value.where == str(tmp_path / name)
    assert "move it away" in caught.value.remedy


@pytest.mark.parametrize("kind", ["folder", "link", "pipe"])
def test_a_lock_that_is_not_a_file_is_refused(tmp_path, kind):
    found = put(kind, tmp_path / "run" / "run.lock")
    with pytest.raises(RunError, match=found) as caught, ModelDirLock(tmp_path / "run"):
        pass
    assert "expected a file" in caught.value.what
    assert caught.value.where == str(tmp_path / "run" / "run.lock")
    assert caught.value.remedy


def test_a_model_dir_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "run").touch()
    for folder in (tmp_path / "run", tmp_path / "run" / "below"):
        with pytest.raises(RunError, match="expected a folder") as caught, ModelDirLock(folder):
            pass
        assert caught.value.where == str(tmp_path / "run")


def test_a_model_dir_that_is_not_unicode_is_refused_before_a_run(tmp_path):
    with pytest.raises(ConfigError, match="expected text in UTF-8") as caught:
        RunDir(tmp_path / "\udcff").check()
    assert "udcff" in caught.value.what


def test_a_model_dir_that_cannot_be_written_is_refused(protected):
    for folder in (protected, protected / "below"):
        with another_user(), pytest.raises(RunError, match="read-only") as caught, ModelDirLock(folder):
            pass
        assert caught.value.where == str(protected)
        assert "right to write" in caught.value.remedy


@pytest.mark.parametrize("part", ["train", "eval"])
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_tensorboard_folders_are_checked_before_the_first_step(tmp_path, part, kind):
    pytest.importorskip("tensorboard")
    found = put(kind, tmp_path / part)
    with pytest.raises(RunError, match=found) as caught:
        TensorBoard(tmp_path).on_fit_start(FitStart(0, 1, None))
    assert "expected a folder" in caught.value.what
    assert caught.value.where == str(tmp_path / part)


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_link_or_pipe_makes_way_for_the_history(tmp_path, kind):
    put(kind, tmp_path / "history.jsonl")
    run(History(tmp_path / "history.jsonl"), step(1))
    assert (tmp_path / "history.jsonl").is_file()
    assert not (tmp_path / "history.jsonl").is_symlink()


@pytest.mark.pictures
@pytest.mark.parametrize("kind", ["folder", "link", "pipe"])
def test_a_loss_curve_that_cannot_be_drawn_is_a_warning(tmp_path, kind, caplog):
    pytest.importorskip("matplotlib")
    run(History(tmp_path / "history.jsonl"), step(1), step(2))
    picture = tmp_path / "loss_curve.png"
    put(kind, picture)
    with caplog.at_level(logging.WARNING):
        LossCurve(tmp_path / "history.jsonl", picture).on_fit_end()
    if kind == "folder":
        assert "the loss curve was not drawn" in caplog.text
        assert str(picture) in caplog.text
    else:
        assert picture.read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.glob("*.partial"))


def test_a_dangling_link_makes_way_for_a_checkpoint(tmp_path):
    partial, folder = tmp_path / "checkpoint_3.partial", tmp_path / "checkpoint_3"
    partial.mkdir()
    folder.symlink_to(tmp_path / "missing")
    publish(partial, folder)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint_3"]
    assert folder.is_dir()
    assert not folder.is_symlink()


@pytest.mark.parametrize(
    ("number", "said", "remedy"),
    [
        (errno.EISDIR, "found a folder", "move it away"),
        (errno.EACCES, "Permission denied", "right to write"),
        (errno.EROFS, "Read-only", "right to write"),
        (errno.EIO, "Input/output error", "check the disk"),
    ],
)
def test_every_error_of_the_system_has_a_place_and_a_remedy(tmp_path, number, said, remedy):
    with pytest.raises(StoreError, match=said) as caught, disk_errors(tmp_path):
        raise OSError(number, os.strerror(number), str(tmp_path))
    assert caught.value.where == str(tmp_path)
    assert remedy in caught.value.remedy


def test_the_place_of_an_error_is_the_file_that_is_in_the_way(tmp_path):
    (tmp_path / "plan.txt.partial").mkdir()
    with pytest.raises(StoreError, match="found a folder") as caught:
        replace_file(tmp_path / "plan.txt", b"text")
    assert caught.value.where == str(tmp_path / "plan.txt.partial")
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="found a file") as caught:
        replace_file(tmp_path / "file" / "plan.txt", b"text")
    assert caught.value.where == str(tmp_path / "file")


def test_a_full_disk_keeps_its_own_error(tmp_path):
    with pytest.raises(DiskFullError) as caught, disk_errors(tmp_path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert "checkpoint" not in str(caught.value)  # the disk may be full before the first one is saved


def test_a_free_place_is_accepted(tmp_path):
    check_place(tmp_path / "a" / "b", expected="a file")
    check_place(tmp_path, expected="a folder")
    (tmp_path / "link").symlink_to(tmp_path)
    check_place(tmp_path / "link", expected="a folder")


def test_a_checkpoint_that_the_user_may_not_look_into_is_an_error(protected):
    model_dir = protected.parent
    folder = model_dir / "checkpoint_3"
    folder.mkdir()
    (folder / "manifest.json").touch()
    assert complete_checkpoints(model_dir) == [folder]
    folder.chmod(0)
    with another_user(), pytest.raises(ConfigError, match="a path cannot be used: Permission denied"):
        complete_checkpoints(model_dir)
