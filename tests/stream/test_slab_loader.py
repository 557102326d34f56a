"""The thread that copies stages to slabs: commits until its start, failures, and no views that stay."""

import threading

import pytest
import torch

from headwater.core.errors import DiskFullError
from headwater.core.stage import ParamSpec, StageSpec
from headwater.core.streams import IMMEDIATE
from headwater.fabric.fabric import ALONE
from headwater.store.ledger import Ledger
from headwater.stream.device import CpuDevice
from headwater.stream.slab_loader import SlabLoader
from headwater.stream.slabs import SlabDirectory, SlabPool, Want

STAGES = [
    StageSpec(index, f"s{index}", (ParamSpec("w", (16,), torch.float32, torch.float32),)) for index in (0, 1)
]


class Store:
    """A store whose images have the number of their stage and of the last commit; a read waits for `go`."""

    def __init__(self, failing=None):
        self.ledger, self.tier = Ledger(), self
        self.go = threading.Event()
        self._failing = failing
        self.error = DiskFullError("there is no room")

    def resident_wire(self, stage):
        return None

    def on_device(self, stage):
        return None

    def fetch(self, stage, into, up_to, stream=IMMEDIATE):
        assert self.go.wait(200)
        if stage == self._failing:
            raise self.error
        into[:64].view(torch.float32).fill_(10 * stage + up_to)


class OtherDevice(CpuDevice):
    """A device that cannot compute in host memory, so that data from disk is staged."""

    reads_host = False


def loader_of(store, device=None):
    device = device or CpuDevice()
    pool = SlabPool(STAGES, 2, device.allocate_slab)
    directory = SlabDirectory(ALONE, len(pool.slabs))
    return SlabLoader(store, STAGES, pool, directory, device), pool, directory


@pytest.mark.parametrize("device", [CpuDevice(), OtherDevice()], ids=["host", "staged"])
def test_a_stage_is_loaded_with_the_commits_until_its_start(device):
    store = Store()
    loader, pool, directory = loader_of(store, device)
    store.ledger.num_commits = 3
    ready = loader.start(1, Want(1, 7))
    store.ledger.num_commits = 4  # later than the start
    assert directory.find(Want(1, 7)) is None
    store.go.set()
    ready.result(200)
    assert bool((pool.slabs[1].buffer[:64].view(torch.float32) == 13).all())
    assert directory.find(Want(1, 7)) == 1
    loader.close()


def test_no_slab_is_in_use_after_its_stage_was_loaded():
    store = Store()
    loader, pool, _ = loader_of(store)
    store.go.set()
    loader.start(0, Want(0, 1)).result(200)
    assert not pool.slabs[0].in_use  # while the thread still runs
    loader.close()


def test_a_failure_is_raised_and_published_for_the_other_ranks():
    store = Store(failing=0)
    loader, _, directory = loader_of(store)
    store.go.set()
    with pytest.raises(DiskFullError):
        loader.start(0, Want(0, 1)).result(200)
    assert directory.failure == "stage 's0' cannot be read: there is no room"
    assert directory.find(Want(0, 1)) is None
    loader.start(1, Want(1, 1)).result(200)  # the thread continues
    loader.close()


def test_an_error_of_another_package_is_published_too():
    store = Store(failing=0)
    store.error = MemoryError("no memory")
    loader, _, directory = loader_of(store)
    store.go.set()
    with pytest.raises(MemoryError):
        loader.start(0, Want(0, 1)).result(200)
    assert directory.failure == "stage 's0' cannot be read: MemoryError('no memory')"
    loader.close()


def test_closing_leaves_out_the_loads_that_have_not_begun():
    store = Store()
    loader, _, _ = loader_of(store)
    first, second = loader.start(0, Want(0, 1)), loader.start(1, Want(1, 1))
    threading.Timer(0.05, store.go.set).start()
    loader.close()
    assert first.done() and second.cancelled()


def test_a_later_failure_replaces_the_whole_text_of_an_earlier_one():
    directory = SlabDirectory(ALONE, 1)
    directory.fail("stage 's1' cannot be read: the disk has failed")
    directory.fail("stage 's0' cannot be read")
    assert directory.failure == "stage 's0' cannot be read"
