"""Gradient sums on disk hold the same values as those in memory."""

import itertools

import pytest
import torch

from headwater.core.buffers import PAGE_BYTES
from headwater.core.errors import CorruptError
from headwater.core.stage import ParamSpec, StageSpec
from headwater.fabric.fabric import ALONE
from headwater.store.gradients.sizes import SumSizes
from headwater.store.gradients.storage import DiskStorage, MemoryStorage

SHAPES = [[(70, 50), (3,)], [(2048,), (1, 1), (33, 100)]]
STAGES = [
    StageSpec(index, f"stage{index}", tuple(
        ParamSpec(f"{index}.{number}", shape, torch.float32, torch.bfloat16)
        for number, shape in enumerate(shapes)
    ))
    for index, shapes in enumerate(SHAPES)
]  # fmt: skip
KEYS = [(stage, param) for stage, shapes in enumerate(SHAPES) for param in range(len(shapes))]


@pytest.fixture(params=[None, torch.float32], ids=["bf16", "fp32"])
def both(request, tmp_path, monkeypatch):
    monkeypatch.setattr("headwater.store.gradients.storage._BLOCK_BYTES", PAGE_BYTES)
    sizes = SumSizes(STAGES, request.param)
    disk = DiskStorage(STAGES, sizes, ALONE, tmp_path, verify=True)
    yield MemoryStorage(sizes, ALONE), disk
    disk.close()


def test_whole_sums_and_parts_on_disk_equal_those_in_memory(both):
    torch.manual_seed(0)
    for key in KEYS:
        numel = both[0].sizes.numel(key)
        whole, more = torch.randn(numel), torch.randn(SHAPES[key[0]][key[1]], dtype=torch.bfloat16)
        cuts = sorted(torch.randint(0, numel + 1, (6,)).tolist())
        for sums in both:
            sums.write(key, whole)
            sums.add(key, more)
            sums.release_pages(key[0])
            for start, stop in zip(cuts[::2], cuts[1::2], strict=True):
                sums.write(key, 2 * whole[start:stop], start)
        for start, stop in [(0, None), *itertools.pairwise(cuts)]:
            expected, found = (sums.read(key, start, stop) for sums in both)
            assert found.dtype == expected.dtype
            assert torch.equal(found, expected)
    for sums in both:
        sums.clear((1, 2))
        assert not sums.read((1, 2)).any()


def test_a_changed_byte_on_disk_is_detected(both):
    _, disk = both
    disk.write((0, 0), torch.ones(3500))
    file = disk._files[0]
    with file.origin.open("r+b") as opened:
        opened.seek(2 * PAGE_BYTES - 100 if disk.sizes.dtypes[0, 0] == torch.float32 else 100)
        opened.write(b"x")
    with pytest.raises(CorruptError, match="gradients of stage 'stage0'"):
        disk.read((0, 0))


def test_sizes_are_those_of_trainable_parameters_and_of_the_stage_with_the_most_gradients():
    frozen = ParamSpec("frozen", (9,), torch.float32, torch.float32, requires_grad=False)
    stages = [*STAGES, StageSpec(2, "stage2", (frozen,))]
    sizes = SumSizes(stages, torch.float32)
    assert set(sizes.dtypes) == set(KEYS)
    assert sizes.numel((1, 2)) == 3300 and sizes.num_bytes((1, 2)) == 13200
    assert sizes.largest_gradient_bytes == 2 * (2048 + 1 + 3300)  # as they arrive, in bf16
