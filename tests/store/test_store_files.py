"""The layout of the store's files, and errors of the disk."""

import contextlib
import errno
import itertools
import os
import resource
import threading
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from headwater.core.buffers import PAGE_BYTES, aligned_empty
from headwater.core.errors import CorruptError, DiskFullError, StoreError
from headwater.core.open_file_limit import allow_open_files
from headwater.core.stage import ParamSpec, StageSpec
from headwater.optim.spec import OptimizerSpec
from headwater.store.build import build_store
from headwater.store.disk import DiskTier, staging_bytes
from headwater.store.files import BlockFile, open_files
from headwater.store.layout import GROUP_BYTES, PIECE_ELEMENTS
from headwater.store.memory import MemoryTier
from headwater.store.rule import UpdateRule, stage_layout
from headwater.store.tier import all_pages, no_pages
from headwater.store.update import Update

SHAPES = st.lists(st.lists(st.integers(1, 3000), min_size=0, max_size=2).map(tuple), min_size=1, max_size=6)
WIRES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def stage_of(shapes, wire=torch.float32):
    params = tuple(ParamSpec(f"p{i}", shape, torch.float32, wire) for i, shape in enumerate(shapes))
    return StageSpec(0, "stage", params)


@settings(deadline=None)
@given(SHAPES, WIRES, st.sampled_from(["AdamW", "SGD", "Adafactor"]))
def test_pieces_cover_every_parameter_once(shapes, wire, optimizer):
    rule = UpdateRule(OptimizerSpec(optimizer, {"lr": 0.1}))
    layout = stage_layout(stage_of(shapes, wire), rule)
    pieces = [piece for group in layout.groups for piece in group.pieces]
    for index, param in enumerate(layout.stage.params):
        own = [(piece.start, piece.stop) for piece in pieces if piece.param == index]
        assert own[0][0] == 0
        assert own[-1][1] == param.numel
        assert all(before[1] == after[0] for before, after in itertools.pairwise(own))
        assert all(stop - start <= PIECE_ELEMENTS or not rule.elementwise for start, stop in own)


@settings(deadline=None)
@given(SHAPES, WIRES)
def test_fields_are_aligned_and_do_not_overlap(shapes, wire):
    rule = UpdateRule(OptimizerSpec("AdamW", {"lr": 0.1}))
    layout = stage_layout(stage_of(shapes, wire), rule)
    end_of_last = 0
    for group in layout.groups:
        assert group.offset == end_of_last
        assert group.num_bytes % PAGE_BYTES == 0
        end_of_last = group.offset + group.num_bytes
        position = 0
        rest = torch.empty(group.num_bytes, dtype=torch.uint8)
        for piece in group.pieces:
            for field in piece.fields:
                assert field.offset >= position
                assert field.offset % 64 == 0
                position = field.offset + piece.views(rest)[field.name].nbytes
        assert position <= group.num_bytes
    assert layout.rest_bytes == end_of_last


def test_host_memory_of_the_disk_tier_does_not_grow_with_the_model():
    rule = UpdateRule(OptimizerSpec("AdamW", {"lr": 0.1}))
    small, large = (stage_layout(stage_of([(4096, width)]), rule) for width in (4096, 65536))
    assert staging_bytes([large] * 50) == staging_bytes([small])
    assert staging_bytes([small]) <= 4 * (GROUP_BYTES + 8 * PIECE_ELEMENTS + PAGE_BYTES)


@pytest.mark.parametrize("direct", [True, False])
def test_a_file_returns_the_written_bytes(direct, tmp_path):
    file = BlockFile(tmp_path / "f.bin", 4 * PAGE_BYTES, direct=direct)
    data, back = aligned_empty(2 * PAGE_BYTES), aligned_empty(2 * PAGE_BYTES)
    data.random_(0, 256, generator=torch.Generator().manual_seed(0))
    file.write(PAGE_BYTES, data)
    file.read(PAGE_BYTES, back)
    assert torch.equal(data, back)
    assert os.fstat(file._fd).st_blocks * 512 >= 4 * PAGE_BYTES
    file.close()


def test_two_tiers_in_one_folder_are_separate_and_leave_no_files(tmp_path):
    layout = stage_layout(stage_of([(64, 64)]), UpdateRule(OptimizerSpec("AdamW", {"lr": 0.1})))
    tiers = [DiskTier([layout], tmp_path) for _ in range(2)]
    assert not list(tmp_path.iterdir())
    image = aligned_empty(layout.wire_bytes)
    for number, tier in enumerate(tiers):
        tier.write_wire(0, image.fill_(number))
    for number, tier in enumerate(tiers):
        tier.read_wire(0, image)
        assert (image == number).all()
        tier.close()


def test_no_file_stays_open_if_one_does_not_fit(tmp_path):
    descriptors = Path("/proc/self/fd")
    before = len(list(descriptors.iterdir()))
    sizes = {tmp_path / "a": PAGE_BYTES, tmp_path / "b": 1 << 60}
    with pytest.raises(DiskFullError, match="b"):
        open_files(sizes)
    assert len(list(descriptors.iterdir())) == before


@pytest.mark.parametrize("left", [0, 100, PAGE_BYTES, PAGE_BYTES + 1])
def test_a_short_file_is_corrupt(left, tmp_path):
    path = tmp_path / "f.bin"
    file = BlockFile(path, 2 * PAGE_BYTES)
    os.ftruncate(file._fd, left)
    with pytest.raises(
        CorruptError, match=r"expected 8192 bytes at offset 0, but could read only \d+"
    ) as caught:
        file.read(0, aligned_empty(2 * PAGE_BYTES))
    assert str(path) in str(caught.value)
    file.close()


@pytest.mark.parametrize(
    ("number", "error"),
    [(errno.ENOSPC, DiskFullError), (errno.EDQUOT, DiskFullError), (errno.EIO, StoreError)],
)
def test_system_errors_name_the_file(number, error, tmp_path, monkeypatch):
    file = BlockFile(tmp_path / "f.bin", PAGE_BYTES)

    def fail(*args):
        raise OSError(number, "no")

    monkeypatch.setattr("os.pwrite", fail)
    with pytest.raises(error, match=r"f\.bin"):
        file.write(0, aligned_empty(PAGE_BYTES))
    file.close()


def test_a_folder_that_cannot_be_created_raises(tmp_path):
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(StoreError, match="taken"):
        DiskTier([], tmp_path / "taken" / "store")


def test_a_failed_write_raises_at_every_settle(tmp_path, monkeypatch):
    layout = stage_layout(stage_of([(64, 64)]), UpdateRule(OptimizerSpec("AdamW", {"lr": 0.1})))
    tier = DiskTier([layout], tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("os.pwrite", lambda *args: (_ for _ in ()).throw(OSError(errno.EIO, "no")))
        for _ in tier.groups(0, tier.layouts[0].groups, read=no_pages, write=all_pages):
            pass
        for _ in range(2):
            with pytest.raises(StoreError):
                tier.settle()
    tier.close()


@pytest.mark.parametrize("make_tier", [MemoryTier, DiskTier])
def test_many_threads_may_use_a_store_at_once(make_tier, tmp_path):
    rule = UpdateRule(OptimizerSpec("SGD", {"lr": 1.0}))
    stages = [
        StageSpec(i, f"s{i}", (ParamSpec("w", (1000, 50), torch.float32, torch.float32),)) for i in range(6)
    ]

    def tier(own):
        return MemoryTier(own.layouts) if make_tier is MemoryTier else DiskTier(own.layouts, tmp_path)

    store = build_store(stages, rule, tier, on_disk=range(len(stages)) if make_tier is DiskTier else ())
    for stage in range(6):
        store.parameters.write(stage, lambda piece: piece.master.zero_())
    wrong = []

    def reader(expected):
        for stage in range(6):
            slab = aligned_empty(store.tier.layouts[stage].wire_bytes)
            store.fetch(stage, slab)
            pieces = [piece.master.clone() for piece in store.parameters.read(stage)]
            if not all(bool((p == expected).all()) for p in [*pieces, stages[stage].views(slab)[0]]):
                wrong.append(stage)

    for step in range(4):
        store.begin_step()
        for stage in range(6):
            store.add_gradient((stage, 0), torch.ones(1000, 50), last=True)
        store.end_micro_batch()
        store.commit(Update(step, {"lr": 1.0}))
        threads = [threading.Thread(target=reader, args=(-step - 1,)) for _ in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong
    store.close()


@contextlib.contextmanager
def limit_of_open_files(number):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (number, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_store_may_have_more_files_than_the_soft_limit_of_the_process(tmp_path):
    sizes = {tmp_path / f"{number}.bin": 4096 for number in range(40)}
    before = sum(1 for _ in Path("/proc/self/fd").iterdir())
    with limit_of_open_files(before + 20):
        files = open_files(sizes)
        assert len(files) == 40
        for file in files:
            file.close()


def test_the_limit_of_open_files_is_not_lowered():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    allow_open_files(1)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before


def test_too_many_open_files_are_an_error_that_names_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr("headwater.store.files.allow_open_files", lambda count: None)
    before = sum(1 for _ in Path("/proc/self/fd").iterdir())
    sizes = {tmp_path / f"{number}.bin": 4096 for number in range(40)}
    with (
        limit_of_open_files(before + 20),
        pytest.raises(StoreError, match=r"Too many open files(.|\n)*ulimit"),
    ):
        open_files(sizes)
