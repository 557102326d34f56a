"""Faults while a checkpoint is loaded: damage ends the load on all ranks, other errors are not damage."""

import errno
import os
from pathlib import Path

import pytest
import torch
from checkpoint_runs import ADAMW, SHAPES, STAGES, make_store
from test_checkpoint_errors import flip_byte
from tests.store.thread_fabric import ranks

from headwater.core.buffers import PAGE_BYTES, aligned_empty
from headwater.core.errors import CorruptError, DiskFullError, StoreError
from headwater.core.stage import ParamSpec, StageSpec
from headwater.store.build import build_store
from headwater.store.disk import DiskTier
from headwater.store.memory import MemoryTier
from headwater.store.rule import UpdateRule
from headwater.store.snapshot_load import SavedCheckpoint, load_weights
from headwater.trainer.checkpoint import CheckpointManager


@pytest.fixture
def checkpoint(tmp_path):
    """A checkpoint of a store before its first step."""
    manager = CheckpointManager(tmp_path)
    path = manager.save(make_store(), 1, {})
    manager.wait()
    return path


def opened(make_tier, **options):
    kind = torch.float32
    stages = [
        StageSpec(number, f"stage{number}", tuple(ParamSpec(n, SHAPES[n], kind, kind) for n in names))
        for number, names in enumerate(STAGES)
    ]
    return build_store(stages, UpdateRule(ADAMW), make_tier, **options)


def test_all_ranks_stop_at_the_stage_after_damage(checkpoint):
    flip_byte(checkpoint / "weights_0001.safetensors", -1)

    def load(fabric):
        store = opened(lambda own: MemoryTier(own.layouts, fabric=fabric), fabric=fabric)
        written, write = [], store.parameters.write
        store.parameters.write = lambda stage, fill: (written.append(stage), write(stage, fill))
        with pytest.raises(CorruptError, match="differ from what was written") as caught:
            SavedCheckpoint(checkpoint).restore(store)
        fabric.barrier("the end")
        store.close()
        return written, caught.value.where

    where = str(checkpoint / "weights_0001.safetensors")
    for written, found in ranks(3, load):
        assert written == [0, 1] and found == where


@pytest.fixture
def fail(monkeypatch):
    """Makes reads of weights fail with an error of the system."""

    plain = os.preadv

    def install(number):
        def preadv(file, buffers, offset):
            if "weights_0002" in str(Path(f"/proc/self/fd/{file}").readlink()):
                raise OSError(number, os.strerror(number))
            return plain(file, buffers, offset)

        monkeypatch.setattr(os, "preadv", preadv)

    return install


@pytest.mark.parametrize(
    ("number", "is_damage"), [(errno.EIO, True), (errno.EMFILE, False), (errno.EACCES, False)]
)
def test_only_unreadable_bytes_are_damage(checkpoint, fail, number, is_damage):
    saved = SavedCheckpoint(checkpoint)
    files = {name: saved.tensors(name) for name in saved.manifest.files if name.endswith(".safetensors")}
    saved.tensors = files.__getitem__  # opened before reads fail
    fail(number)
    with pytest.raises(StoreError, match=os.strerror(number)) as caught:
        saved.restore(make_store())
    assert isinstance(caught.value, CorruptError) == is_damage


def test_an_intact_checkpoint_that_cannot_be_opened_is_not_passed_over(checkpoint, fail, monkeypatch):
    manager = CheckpointManager(checkpoint.parent)
    manager.save(make_store(), 2, {})
    manager.wait()
    fail(errno.EMFILE)
    with pytest.raises(StoreError, match=os.strerror(errno.EMFILE)) as caught:
        manager.newest_whole()
    assert not isinstance(caught.value, CorruptError)
    monkeypatch.undo()
    fail(errno.EIO)
    with pytest.raises(CorruptError, match="every checkpoint of this run is damaged"):
        manager.newest_whole()


def test_a_full_disk_of_the_store_is_not_damage(checkpoint, tmp_path, monkeypatch):
    store = opened(lambda own: DiskTier(own.layouts, tmp_path / "tier"), on_disk=range(len(STAGES)))

    def full(*words):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwritev", full)
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(DiskFullError, match="no space left"):
        SavedCheckpoint(checkpoint).restore(store)
    monkeypatch.undo()
    store.close()


def test_damage_of_the_stores_own_files_is_not_that_of_the_checkpoint(checkpoint, tmp_path):
    store = opened(
        lambda own: DiskTier(own.layouts, tmp_path / "tier", verify=True), on_disk=range(len(STAGES))
    )
    SavedCheckpoint(checkpoint).restore(store)
    store.flush()
    for file in store.tier._files:
        os.pwritev(file._fd, [memoryview(aligned_empty(PAGE_BYTES).numpy())], 0)
    with pytest.raises(StoreError, match="differ from what was written") as caught:
        load_weights(store, checkpoint / "weights_0000.safetensors", strict=False)
    assert not isinstance(caught.value, CorruptError) and "stage_" in str(caught.value)
    store.close()
