"""A file whose tensors are read in file order reads the next tensor ahead, and returns the same values."""

import gc
import multiprocessing
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headwater.core.checked_files import CHUNK_BYTES, FileBytes
from headwater.core.errors import CorruptError
from headwater.core.safetensors import TensorFile, TensorFileWriter

SIZES = {"a": 3 << 19, "b": 1 << 18, "c": 5 << 18, "small": 10, "d": (1 << 18) + 3, "e": 3 << 18}
LARGE = [name for name in SIZES if name != "small"]


@pytest.fixture(scope="module")
def values():
    return {name: torch.arange(count, dtype=torch.float32) + count for name, count in SIZES.items()}


@pytest.fixture(scope="module")
def path(values, tmp_path_factory):
    path = tmp_path_factory.mktemp("order") / "x"
    with TensorFileWriter(path, {name: (v.dtype, tuple(v.shape)) for name, v in values.items()}) as file:
        for name, value in values.items():
            file.write(name, 0, value)
    return path


@pytest.fixture
def begun(monkeypatch):
    """Note the tensor of each run that a thread has begun to read."""
    found, read = [], FileBytes.read_padded

    def note(self, low, count, buffer, what):
        found.append(what.removeprefix("tensor "))
        return read(self, low, count, buffer, what)

    monkeypatch.setattr(FileBytes, "read_padded", note)
    return found


def check_in_child(file, expected):
    torch.set_num_threads(1)  # threads of OpenMP do not exist in a fork
    assert torch.equal(file.read_whole("c"), expected)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_does_not_wait_for_threads_of_its_parent(path, values):
    file = TensorFile(path)
    for name in "ab":  # the threads of this process read ahead from now on
        file.read_whole(name)
    child = multiprocessing.get_context("fork").Process(target=check_in_child, args=(file, values["c"]))
    child.start()
    child.join(200)
    child.kill()  # if it still waits
    child.join()
    assert child.exitcode == 0
    assert torch.equal(file.read_whole("c"), values["c"])


def assert_read_once(begun):
    assert all(begun.count(name) == -(-SIZES[name] * 4 // CHUNK_BYTES) for name in LARGE)


def test_reading_ahead_starts_after_the_second_tensor_in_file_order(path, values, begun):
    file = TensorFile(path)
    assert torch.equal(file.read_whole("a"), values["a"])
    assert set(begun) == {"a"}
    assert torch.equal(file.read_whole("b"), values["b"])
    file._transfers.threads.submit(lambda: None).result()
    assert "c" in begun
    for name in "cde":
        assert torch.equal(file.read_whole(name), values[name])
    assert_read_once(begun)


def test_another_order_reads_nothing_ahead(path, values, begun):
    file = TensorFile(path)
    for name in reversed(LARGE):
        assert torch.equal(file.read_whole(name), values[name])
    assert_read_once(begun)


@given(data=st.data())
def test_any_order_and_interleaving_gives_the_values(path, values, data):
    file = TensorFile(path)
    for _ in range(6):
        names = data.draw(st.lists(st.sampled_from(list(SIZES)), min_size=1, max_size=3))
        readers = [(name, file.read_pieces(name), [0]) for name in names]
        while readers:
            name, pieces, done = readers[data.draw(st.integers(0, len(readers) - 1))]
            piece = next(pieces, None)
            if piece is None or data.draw(st.integers(0, 9)) == 0:
                readers = [reader for reader in readers if reader[1] is not pieces]
            if piece is not None:
                expected = values[name][done[0] : done[0] + piece.numel()]
                assert torch.equal(piece, expected)
                done[0] += piece.numel()


def test_what_is_read_ahead_is_freed_with_its_file(path, values):
    file = TensorFile(path)
    for name in "abc":
        file.read_whole(name)
    gone, gc_was_on = weakref.ref(file._in_order), gc.isenabled()
    gc.disable()
    del file
    assert gone() is None
    if gc_was_on:
        gc.enable()


def test_damage_is_raised_where_its_tensor_is_read(path, values, tmp_path):
    with TensorFileWriter(tmp_path / "x", {n: (v.dtype, tuple(v.shape)) for n, v in values.items()}) as made:
        for name, value in values.items():
            made.write(name, 0, value)
    file = TensorFile(tmp_path / "x", made.chunks)
    with (tmp_path / "x").open("r+b") as damaged:
        damaged.seek(file.places["c"].offset + 40)
        damaged.write(b"!!!!")
    for name in "ab":
        assert torch.equal(file.read_whole(name), values[name])
    with pytest.raises(CorruptError, match="tensor c"):
        file.read_whole("c")
    for name in "de":
        assert torch.equal(file.read_whole(name), values[name])
