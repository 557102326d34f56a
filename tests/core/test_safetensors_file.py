"""Safetensors files are written and read in arbitrary runs, and compared with the safetensors library."""

import math

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from headwater.core import checked_files
from headwater.core.errors import CorruptError
from headwater.core.safetensors import DTYPE_CODES, TensorFile, TensorFileWriter

TENSORS = {
    "flags": torch.tensor([True, False, True]),
    "weight": torch.arange(60.0).view(5, 12),
    "scalar": torch.tensor(0.1, dtype=torch.float64),
    "half": torch.linspace(0, 1, 33).bfloat16(),
    "empty": torch.empty(0, 4),
    "count": torch.arange(7),
}
LAYOUT = {name: (value.dtype, tuple(value.shape)) for name, value in TENSORS.items()}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Write a file in small chunks; return it and its checksums."""
    path = tmp_path_factory.mktemp("file") / "x.safetensors"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checked_files, "CHUNK_BYTES", 24)
        with TensorFileWriter(path, LAYOUT) as file:
            for name, value in reversed(TENSORS.items()):  # in another order than they lie
                flat = value.view(-1)
                for start in reversed(range(0, value.numel(), 11)):
                    file.write(name, start, flat[start : start + 11])
    return path, file.chunks


def test_the_library_reads_our_files(written):
    loaded = safetensors.torch.load_file(written[0])
    assert loaded.keys() == TENSORS.keys()
    for name, value in TENSORS.items():
        assert loaded[name].dtype == value.dtype
        assert torch.equal(loaded[name], value), name


def test_files_of_the_library_are_read(tmp_path):
    path = tmp_path / "x.safetensors"
    safetensors.torch.save_file(
        {**TENSORS, **{str(dtype): torch.ones(3).to(dtype) for dtype in DTYPE_CODES}}, path
    )
    file = TensorFile(path)
    for name, value in TENSORS.items():
        assert torch.equal(file.read_whole(name), value), name
    for dtype in DTYPE_CODES:
        assert torch.equal(file.read_whole(str(dtype)), torch.ones(3).to(dtype))


@given(data=st.data())
def test_arbitrary_runs_are_read(written, data):
    """Runs begin and end anywhere in a chunk, and the same reader reads them one after the other."""
    file = TensorFile(*written)
    for _ in range(4):
        name = data.draw(st.sampled_from(sorted(TENSORS)))
        numel = math.prod(LAYOUT[name][1])
        start = data.draw(st.integers(0, numel))
        count = data.draw(st.integers(0, numel - start))
        assert torch.equal(file.read(name, start, count), TENSORS[name].view(-1)[start : start + count])


def test_a_run_is_checked_no_further_than_its_chunks(written, tmp_path):
    path, chunks = written
    damaged = tmp_path / "x.safetensors"
    data = bytearray(path.read_bytes())
    place = TensorFile(path).places["weight"]
    data[place.offset + 4 * 30] ^= 1
    damaged.write_bytes(data)
    file = TensorFile(damaged, chunks)
    assert file.read("weight", 0, 11).tolist() == TENSORS["weight"].view(-1)[:11].tolist()
    with pytest.raises(CorruptError, match="tensor weight"):
        file.read("weight", 29, 3)
