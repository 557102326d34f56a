"""Gradient buffers in memory and on disk behave the same."""

import errno
import shutil

import pytest
import torch

from headwater.core.errors import StoreError
from headwater.core.stage import ParamSpec, StageSpec
from headwater.store.gradients.buffer import DiskBuffer, MemoryBuffer
from headwater.store.gradients.buffered import BufferedSums

STAGES = [
    StageSpec(0, "stage0", tuple(
        ParamSpec(f"stage0.{name}", (3, 2), torch.float32, torch.float32) for name in "ab"
    ))
]  # fmt: skip


@pytest.fixture(params=["memory", "disk"])
def buffer(request, tmp_path):
    made = MemoryBuffer() if request.param == "memory" else DiskBuffer(STAGES, tmp_path, None)
    yield made
    made.close()


def test_gradients_are_kept_until_they_are_taken(buffer):
    buffer.put(0, [torch.ones(3, 2), None])
    assert torch.equal(buffer.look(0)[0], torch.ones(3, 2)) and buffer.look(0)[1] is None
    assert torch.equal(buffer.take(0)[0], torch.ones(3, 2))
    assert buffer.take(0) is None and buffer.look(0) == []


def test_a_dropped_gradient_is_removed(buffer):
    buffer.put(0, [torch.ones(3, 2), torch.zeros(3, 2)])
    buffer.drop(0, 0)
    assert buffer.look(0)[0] is None
    buffer.drop(0, 1)
    assert buffer.take(0) is None


def test_saved_gradients_can_be_restored(buffer):
    buffer.put(0, [torch.ones(3, 2), None])
    buffer.keep(0)
    buffer.take(0)
    buffer.put(0, [None, torch.zeros(3, 2)])
    buffer.restore(0)
    first, second = buffer.look(0)
    assert torch.equal(first, torch.ones(3, 2)) and second is None
    buffer.forget()


def test_a_sparse_gradient_keeps_its_entries(buffer):
    sparse = torch.ones(3, 2).to_sparse(1)
    buffer.put(0, [sparse, None])
    (found, _) = buffer.take(0)
    assert found.is_sparse and torch.equal(found.to_dense(), torch.ones(3, 2))


def test_a_step_can_be_undone_after_its_sums_could_not_be_saved(tmp_path):
    folder = tmp_path / "gradients"
    folder.mkdir()
    sums = BufferedSums(STAGES, DiskBuffer(STAGES, folder, None))
    sums.put(0, [torch.ones(3, 2), None])
    sums.begin_undoable({0})
    shutil.rmtree(folder)
    with pytest.raises(StoreError):
        sums.open(0)
    sums.restore([(0, 0)])
    assert torch.equal(sums.look(0)[0], torch.ones(3, 2))
    sums.close()


def test_a_step_can_be_undone_after_the_copy_of_its_sums_could_not_be_written(tmp_path, monkeypatch):
    sums = BufferedSums(STAGES, DiskBuffer(STAGES, tmp_path, None))
    sums.put(0, [torch.ones(3, 2), None])
    sums.begin_undoable({0})
    with monkeypatch.context() as patch:
        patch.setattr("os.pwrite", lambda *args: (_ for _ in ()).throw(OSError(errno.EIO, "no")))
        with pytest.raises(StoreError):
            sums.open(0)
    sums.restore([(0, 0)])
    assert torch.equal(sums.look(0)[0], torch.ones(3, 2))
    sums.close()
