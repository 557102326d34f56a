"""What the tests of integrations share: plans that stream, text, and what is equal."""

import gzip
import re
import threading
from contextlib import contextmanager
from importlib import resources
from pathlib import Path

import pytest
import torch

import headwater

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
    """Rows of bytes of a novel.

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
def watched_memory():
    """Gives a list, to which it adds the bytes by which this process' own memory grows at its peak.

    Files that are mapped into memory do not count.
    """

    def sample():
        while not stopped.wait(0.002):
            samples.append(own_memory())

    growth, stopped = [], threading.Event()
    samples = [own_memory()]
    watcher = threading.Thread(target=sample)
    watcher.start()
    try:
        yield growth
    finally:
        stopped.set()
        watcher.join()
    growth.append(max(samples) - samples[0])


def own_memory():
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024
