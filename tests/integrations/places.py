"""Helpers for the tests of integrations: plans that stream, text, and comparisons."""

import gzip
from contextlib import contextmanager
from importlib import resources

import pytest
import torch

import headwater
from headwater.core import file_memory

PLANS = {
    "resident": {"tier": "memory"},
    "slabs": {"tier": "memory", "num_slabs": 2},
    "disk": {"tier": "disk", "num_slabs": 2, "activations": "recompute"},
}
every_plan = pytest.mark.parametrize("plan", PLANS)


def backend(plan, tmp_path):
    disk = {"disk": tmp_path / "store"} if plan == "disk" else {}
    return headwater.backend("CSX", **PLANS[plan], **disk)


def text_rows(num_rows, length):
    """Return rows of bytes of a novel.

    Returns:
        [num_rows, length] int64.
    """
    packed = resources.files("headwater") / "assets" / "text" / "great_expectations.txt.gz"
    text = gzip.decompress(packed.read_bytes())[: num_rows * length]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long().view(num_rows, length)


def assert_same_tensors(left, right):
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


@contextmanager
def bytes_in_files():
    """Yield a list that collects the sizes of tensors allocated in files inside the context."""
    sizes = []
    put_in_file = file_memory._put_in_file

    def noted(memory, folder):
        sizes.append(len(memory))
        put_in_file(memory, folder)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file_memory, "_put_in_file", noted)
        yield sizes
