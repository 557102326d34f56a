"""Which bytes of a process are resident, and belong to one tensor alone."""

import mmap

import torch

from headwater.core.owned_memory import ONLY_OWNER, private_resident_bytes, storage_references

SIZE = 8 << 20


def resident(tensor):
    return private_resident_bytes([(tensor.data_ptr(), tensor.nbytes)])


def test_only_pages_that_were_written_are_resident():
    pages = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    tensor = torch.frombuffer(pages, dtype=torch.uint8)
    assert resident(tensor) == 0
    tensor[: SIZE // 2] = 1
    assert resident(tensor) == SIZE // 2


def test_pages_of_files_do_not_count(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(bytes(SIZE))
    with path.open("r+b") as file:
        tensor = torch.frombuffer(mmap.mmap(file.fileno(), SIZE), dtype=torch.uint8)
        tensor.fill_(1)
        assert resident(tensor) == 0


def test_pages_that_lie_partly_in_a_range_do_not_count():
    pages = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    tensor = torch.frombuffer(pages, dtype=torch.uint8).fill_(1)
    assert resident(tensor[1:-1]) == SIZE - 2 * mmap.PAGESIZE


def test_a_view_refers_to_the_storage_of_its_base():
    tensor = torch.zeros(4)
    assert storage_references(tensor) == ONLY_OWNER
    view = tensor[1:]
    assert storage_references(tensor) > ONLY_OWNER
    del view
    assert storage_references(tensor) == ONLY_OWNER
