"""Large runs of files are written behind the caller and read ahead of it, with errors in their place."""

import errno
import itertools
import os
import threading
import zlib
from pathlib import Path

import numpy
import pytest
import safetensors.torch
import torch

from headwater.core.checked_files import CheckedFile
from headwater.core.errors import CorruptError, DiskFullError, StoreError
from headwater.core.safetensors import TensorFile, TensorFileWriter, read_runs
from headwater.core.transfers import BUFFER_BYTES, read_ahead, shared_transfers

MIB = 1 << 20


def random_bytes(count):
    return numpy.random.default_rng(0).bytes(count)


def write(path, content, cuts):
    """Write a file in runs that begin at `cuts`, the last run first; return its chunks."""
    borders = [0, *cuts, len(content)]
    with CheckedFile(path, len(content)) as file:
        for start, stop in reversed(list(itertools.pairwise(borders))):
            file.put(start, memoryview(content)[start:stop])
    return file.chunks


CUTS = [
    [],
    [4096 * 100],
    [10, 4096 * 100 + 1, 4096 * 100 + 2, 5 * MIB + 4095, 5 * MIB + 4097],
    [2 * MIB + 1, 3 * MIB - 1, 3 * MIB],
]


@pytest.mark.parametrize("cuts", CUTS)
def test_runs_at_any_offset_are_written(cuts, tmp_path):
    content = random_bytes(9 * MIB + 777)
    chunks = write(tmp_path / "x", content, cuts)
    assert (tmp_path / "x").read_bytes() == content
    assert sum(length for _, length, _ in chunks) == len(content)
    for offset, length, checksum in chunks:
        assert zlib.crc32(content[offset : offset + length]) == checksum


@pytest.mark.parametrize("refused", ["open", "pwrite"])
def test_a_file_system_without_direct_writes(refused, tmp_path, monkeypatch):
    """Some refuse the flag, and some accept it and refuse the alignment."""
    content, system = random_bytes(9 * MIB + 777), getattr(os, refused)
    direct = set()
    opened = os.open

    def note(path, flags, *mode):
        if flags & os.O_DIRECT and refused == "open":
            raise OSError(errno.EINVAL, "no direct writes")
        file = opened(path, flags, *mode)
        if flags & os.O_DIRECT:
            direct.add(file)
        else:
            direct.discard(file)
        return file

    def refuse(file, data, offset):
        if file in direct:
            raise OSError(errno.EINVAL, "no direct writes")
        return system(file, data, offset)

    monkeypatch.setattr(os, "open", note)
    if refused == "pwrite":
        monkeypatch.setattr(os, "pwrite", refuse)
    write(tmp_path / "x", content, [2 * MIB + 1])
    assert (tmp_path / "x").read_bytes() == content


@pytest.mark.parametrize(("number", "error"), [(errno.ENOSPC, DiskFullError), (errno.EIO, StoreError)])
def test_a_write_that_fails_behind_the_caller_raises(number, error, tmp_path, monkeypatch):
    before = set(Path("/proc/self/fd").iterdir())

    def fail(*args):
        raise OSError(number, "no")

    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(error, match="x"), CheckedFile(tmp_path / "x", MIB) as file:
        file.put(0, memoryview(bytes(MIB)))
    assert set(Path("/proc/self/fd").iterdir()) <= before
    transfers = shared_transfers()
    buffers = [transfers.buffers.get_nowait() for _ in range(transfers.buffers.qsize())]
    for buffer in buffers:  # the next test may have the same transfers
        transfers.buffers.put(buffer)
    assert sum(buffer.numel() for buffer in buffers) == BUFFER_BYTES


def test_files_that_are_open_at_once_share_their_buffers(tmp_path):
    """An export has all of its shards open. Their memory must not grow with their number."""
    content = random_bytes(MIB)
    files = [CheckedFile(tmp_path / str(number), MIB) for number in range(20)]
    transfers = shared_transfers()
    for file in files:
        file.__enter__()
        file.put(0, memoryview(content))
        assert file._behind._transfers is transfers
    for file in files:
        file.__exit__(None)
    assert transfers.buffers.qsize() * transfers.buffers.get().numel() == BUFFER_BYTES
    assert all(path.read_bytes() == content for path in tmp_path.iterdir())


def test_threads_end_with_the_last_file(tmp_path):
    with CheckedFile(tmp_path / "x", MIB) as file:
        file.put(0, memoryview(bytes(MIB)))
    names = [thread for thread in threading.enumerate() if thread.name.startswith("headwater-file")]
    for thread in names:
        thread.join(200)
        assert not thread.is_alive()


def test_zeros_are_not_written(tmp_path, monkeypatch):
    layout = {"moment": (torch.float32, (3 * MIB,)), "weight": (torch.float32, (5,))}
    written = []
    system = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda *args: written.append(len(args[1])) or system(*args))
    with TensorFileWriter(tmp_path / "x", layout) as file:
        file.write_zeros("moment", 0, 2 * MIB)
        file.write_zeros("moment", 2 * MIB, MIB)
        file.write("weight", 0, torch.arange(5.0))
    assert sum(written) < 1000
    found = safetensors.torch.load_file(tmp_path / "x")
    assert not found["moment"].any()
    assert found["weight"].tolist() == [0, 1, 2, 3, 4]
    TensorFile(tmp_path / "x", file.chunks).verify()


def read_numbers(numbers, begun):
    def read(number, into):
        begun.append(number)
        if number == 13:
            raise CorruptError("unlucky")
        return into[:100].fill_(number)

    return ((100, lambda into, number=number: read(number, into)) for number in numbers)


def test_reads_come_in_their_order_a_few_ahead():
    begun = []
    for number, data in enumerate(read_ahead(read_numbers(range(12), begun))):
        assert data.tolist() == [number] * 100
        assert len(begun) <= number + 4
    assert len(begun) == 12


def test_reads_use_the_same_buffers_again():
    transfers = shared_transfers()
    places = {data.data_ptr() for _ in range(3) for data in read_ahead(read_numbers(range(12), []))}
    assert len(places) <= 4
    assert transfers is shared_transfers()


def test_a_read_whose_caller_stopped_keeps_its_buffer():
    """A thread may still read to it."""
    transfers, gate = shared_transfers(), threading.Event()

    def read(into, number):
        if number:
            gate.wait(60)
        return into[:100].fill_(number)

    reads = read_ahead((100, lambda into, number=number: read(into, number)) for number in range(3))
    next(reads)
    reads.close()
    found = [transfers.take(100) for _ in range(4)]
    gate.set()
    transfers.threads.submit(lambda: None).result()
    assert not any(int(buffer[0]) for buffer in found)


def test_a_failed_read_raises_in_its_place():
    found = []
    with pytest.raises(CorruptError, match="unlucky"):
        for data in read_ahead(read_numbers(range(20), [])):
            found.append(int(data[0]))
    assert found == list(range(13))


def test_runs_of_several_files_are_read_and_checked(tmp_path):
    values = torch.arange(5 * MIB // 4, dtype=torch.float32)
    chunks = {}
    for name in "ab":
        with TensorFileWriter(tmp_path / name, {"w": (values.dtype, tuple(values.shape))}) as file:
            file.write("w", 0, values)
        chunks[name] = file.chunks
    files = {name: TensorFile(tmp_path / name, chunks[name]) for name in "ab"}
    runs = [(files[name], "w", start, MIB // 4) for start in (0, MIB, 3) for name in "ab"]
    for run, found in zip(runs, read_runs(iter(runs)), strict=True):
        assert torch.equal(found, values[run[2] : run[2] + MIB // 4])
    assert torch.equal(files["a"].read_whole("w"), values)
    with (tmp_path / "a").open("r+b") as file:
        file.seek(files["a"].places["w"].offset + 4 * MIB + 40)
        file.write(b"!")
    with pytest.raises(CorruptError, match="tensor w"):
        files["a"].read_whole("w")
    with pytest.raises(CorruptError, match="tensor w"):
        list(files["a"].read_pieces("w"))
