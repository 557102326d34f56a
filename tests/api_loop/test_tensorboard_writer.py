"""The writer for TensorBoard, which is torch's writer where it is installed."""

import shutil
import sys
from pathlib import Path

import pytest
import torch

from headwater.api.step import step_closure, trace
from headwater.core.errors import ConfigError, StoreError
from headwater.fabric import membership
from headwater.fabric.fabric import Alone
from headwater.utils import tensorboard


def test_scalars_written_in_closures_are_in_the_file(tmp_path):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    writer = tensorboard.SummaryWriter(str(tmp_path))
    log = step_closure(lambda loss, step: writer.add_scalar("loss", loss, step))
    step = trace(lambda value: torch.tensor(value, requires_grad=True) * 2)
    for number in range(3):
        log(step(float(number)), number)
    writer.close()
    events = event_accumulator.EventAccumulator(str(tmp_path)).Reload().Scalars("loss")
    assert [(event.step, event.value) for event in events] == [(0, 0.0), (1, 2.0), (2, 4.0)]


def test_an_error_names_the_missing_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"SummaryWriter needs .*\n.*pip install 'headwater\[plot\]'"):
        tensorboard.SummaryWriter  # noqa: B018
    with pytest.raises(AttributeError):
        tensorboard.Writer  # noqa: B018


def test_a_folder_or_file_that_cannot_be_written_is_an_error_of_this_project(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="remedy: move it away, or name another folder") as refused:
        tensorboard.SummaryWriter(str(tmp_path / "file"))
    assert refused.value.where == str(tmp_path / "file")
    with pytest.raises(StoreError, match=r"Read-only|Permission|No such file"):
        tensorboard.SummaryWriter(log_dir=Path("/proc/none"))
    writer = tensorboard.SummaryWriter(str(tmp_path / "new"))
    writer.close()  # its next call opens another file
    shutil.rmtree(tmp_path / "new")
    (tmp_path / "new").touch()
    with pytest.raises(StoreError, match="remedy: move it away, or name another folder"):
        writer.add_scalar("loss", 1.0, 1)


class SecondRank(Alone):
    rank = 1


def test_only_the_first_rank_opens_a_file(tmp_path, monkeypatch):
    writers = tensorboard.SummaryWriter
    monkeypatch.setattr(membership.joined, "value", SecondRank())
    with writers(str(tmp_path / "second")) as writer:
        writer.add_scalar("loss", 1.0, 1)
        writer.flush()

    class Twice(writers):
        def add_twice(self, value):
            self.add_scalar("value", 2 * value)

    other = Twice(log_dir=tmp_path / "second")
    other.add_twice(1.0)
    assert isinstance(other, Twice) and other.log_dir == other.get_logdir() == str(tmp_path / "second")
    assert isinstance(writer, writers) and not (tmp_path / "second").exists()
    monkeypatch.undo()
    with writers(str(tmp_path / "first")) as writer:
        writer.add_scalar("loss", 1.0, 1)
    assert list((tmp_path / "first").iterdir())
