"""Page-locked host memory that is lent again, and memory that is kept until its copy is done."""

import gc

import pytest
import torch

from headwater.core.errors import StreamError
from headwater.core.streams import Event
from headwater.stream.host_arena import HostArena, InFlight


class Locks:
    """Counts the bytes of page-locked memory."""

    def __init__(self, limit=1 << 40):
        self.bytes = self.count = self.most = 0
        self._limit = limit

    def __call__(self, memory):
        (pages,) = memory
        if self.bytes + pages.nbytes > self._limit:
            raise StreamError("no memory can be page-locked")
        self.bytes += pages.nbytes
        self.count += 1
        self.most = max(self.most, self.bytes)

        def unlock():
            self.bytes -= pages.nbytes

        return unlock


def test_dropped_memory_is_lent_again():
    locks = Locks()
    arena = HostArena(locks)
    first = arena.lend(5000)
    assert (first.dtype, first.numel(), first.data_ptr() % 4096) == (torch.uint8, 5000, 0)
    address, view = first.data_ptr(), first[10:20].view(torch.int16)
    del first
    assert arena.lend(5000).data_ptr() != address  # a view of it still exists
    del view
    assert {arena.lend(n).data_ptr() for n in (5000, 8192, 4097)} <= {address, arena.lend(6000).data_ptr()}
    assert locks.count == 2
    arena.close()
    assert locks.bytes == 0


def test_new_sizes_replace_idle_ones():
    locks = Locks()
    arena = HostArena(locks)
    for pages in range(1, 60):
        blocks = [arena.lend(4096 * pages) for _ in range(3)]
        assert len({block.data_ptr() for block in blocks}) == 3
        del blocks
        assert locks.bytes <= 2 * 3 * 4096 * pages
    arena.close()
    assert locks.bytes == 0


def test_memory_that_is_lent_at_the_end_is_unlocked_when_it_is_dropped():
    locks = Locks()
    arena = HostArena(locks)
    block = arena.lend(1)
    arena.close()
    assert locks.bytes == 4096
    block.fill_(7)
    del block
    gc.collect()
    assert locks.bytes == 0


def test_a_refused_lock_changes_nothing():
    arena = HostArena(Locks(limit=8192))
    block = arena.lend(8192)
    with pytest.raises(StreamError, match="page-locked"):
        arena.lend(1)
    address = block.data_ptr()
    del block
    assert arena.lend(8192).data_ptr() == address


class Copied(Event):
    def __init__(self, waited):
        self.reached, self._waited = False, waited

    def query(self):
        return self.reached

    def synchronize(self):
        self._waited.append(self)
        self.reached = True


def test_copies_in_flight_are_limited_and_their_memory_is_kept():
    waited = []
    flight, copies = InFlight(100), [Copied(waited) for _ in range(4)]
    for copied, num_bytes in zip(copies, (60, 30, 60, 500), strict=True):
        flight.add(copied, torch.empty(num_bytes, dtype=torch.uint8))
    assert waited == copies[:3]
    flight.finish()
    assert waited == copies
