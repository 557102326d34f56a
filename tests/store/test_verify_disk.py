"""Changed bytes on the disk raise an error that names the place; they are never used as values."""

import os

import pytest
import torch

from headwater.core.buffers import PAGE_BYTES, aligned_empty
from headwater.core.errors import CorruptError, StoreError
from headwater.core.stage import ParamSpec, StageSpec
from headwater.optim.spec import OptimizerSpec
from headwater.store.build import GradientOptions, build_store
from headwater.store.disk import DiskTier
from headwater.store.files import BlockFile, Checksums
from headwater.store.rule import UpdateRule
from headwater.store.update import Update

STAGES = [
    StageSpec(index, f"blocks.{index}", (ParamSpec("w", (300, 70), torch.float32, torch.bfloat16),))
    for index in range(2)
]
WIRE_BYTES = 45056  # 300 × 70 × 2, in whole pages


def make_store(folder, *, verify):
    def make_tier(own):
        return DiskTier(own.layouts, folder, verify=verify)

    rule, gradients = (
        UpdateRule(OptimizerSpec("AdamW", {"lr": 0.1})),
        GradientOptions(folder=folder, verify=verify),
    )
    store = build_store(STAGES, rule, make_tier, on_disk=range(len(STAGES)), gradients=gradients)
    for stage in range(len(STAGES)):
        store.parameters.write(stage, lambda piece: piece.master.fill_(1.0))
    return store


def flip(file, offset):
    """Change one bit of a file without the store's knowledge."""
    page = offset // PAGE_BYTES * PAGE_BYTES
    buffer = aligned_empty(PAGE_BYTES)
    os.preadv(file._fd, [memoryview(buffer.numpy())], page)
    buffer[offset - page] ^= 16
    os.pwritev(file._fd, [memoryview(buffer.numpy())], page)


def train(store):
    for stage in range(len(STAGES)):
        store.add_gradient((stage, 0), torch.ones(300, 70, dtype=torch.bfloat16), last=True)
    store.end_micro_batch()
    store.commit(Update(1, {"lr": 0.1}))


def test_unchanged_files_pass_verification(tmp_path):
    store = make_store(tmp_path, verify=True)
    for _ in range(3):
        train(store)
        store.flush()
    assert all(piece.master[0] < 1 for stage in range(2) for piece in store.parameters.read(stage))
    store.close()


@pytest.mark.parametrize("offset", [17, WIRE_BYTES - 9000])
def test_a_changed_weight_is_detected_by_a_fetch(tmp_path, offset):
    store = make_store(tmp_path, verify=True)
    flip(store.tier._files[1], offset)
    into = aligned_empty(WIRE_BYTES)
    store.fetch(0, into)
    with pytest.raises(CorruptError, match=r"stage_0001\.bin") as caught:
        store.fetch(1, into)
    assert "bytes 0 to 45056 of the file of stage 'blocks.1'" in str(caught.value)
    assert "resume from the last checkpoint" in str(caught.value)
    store.close()


def test_changed_optimizer_state_is_detected_by_the_update(tmp_path):
    store = make_store(tmp_path, verify=True)
    train(store)
    flip(store.tier._files[0], WIRE_BYTES + 100_000)
    with pytest.raises(CorruptError, match=r"bytes 45056 to \d+ of the file of stage 'blocks\.0'"):
        store.flush_stage(0)
    with pytest.raises(StoreError, match="differ from what was written"):
        store.flush_stage(0)
    store.flush_stage(1)
    store.close()


def test_a_changed_gradient_is_detected(tmp_path):
    store = make_store(tmp_path, verify=True)
    train(store)
    flip(store.gradients._sums._buffer._files[1], 5000)
    with pytest.raises(CorruptError, match=r"the gradients of stage 'blocks\.1'"):
        store.flush_stage(1)
    store.close()


def test_without_verification_changed_bytes_are_not_detected(tmp_path):
    store = make_store(tmp_path, verify=False)
    before, after = aligned_empty(WIRE_BYTES), aligned_empty(WIRE_BYTES)
    store.fetch(1, before)
    flip(store.tier._files[1], 17)
    store.fetch(1, after)
    assert (before != after).nonzero().tolist() == [[17]]
    store.close()


def test_a_failed_write_keeps_the_old_checksum(tmp_path):
    file = BlockFile(
        tmp_path / "f",
        PAGE_BYTES,
        checksums=Checksums(tmp_path / "f", "it", torch.zeros(8, dtype=torch.uint8)),
    )
    ones, zeros = (torch.full((PAGE_BYTES,), value, dtype=torch.uint8) for value in (1, 0))
    first, second = aligned_empty(PAGE_BYTES).copy_(ones), aligned_empty(PAGE_BYTES).copy_(zeros)
    file.write(0, first)
    file.close()
    with pytest.raises(StoreError):
        file.write(0, second)
    file._checksums.check(0, memoryview(first.numpy()))
