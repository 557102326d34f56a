"""Sums of several hosts in a user's loop: they are put together when a rank reads them."""

import pytest
import torch
from thread_hosts import hosts

from headwater.core.errors import StreamError
from headwater.core.stage import ParamSpec, StageSpec
from headwater.fabric import membership
from headwater.store.gradients.assembly import HostAssembly
from headwater.store.gradients.rank_sums import Beginning, RankSums
from headwater.store.gradients.sizes import SumSizes
from headwater.store.gradients.storage import MemoryStorage

STAGES = [StageSpec(0, "s", tuple(ParamSpec(n, (4,), torch.float32, torch.float32) for n in "ab"))]
KEYS = [(0, 0), (0, 1)]
GENERATIONS = dict.fromkeys(KEYS, 1)


def on_hosts(program):
    """Return the results of `program(host, sums, assembly, add)` on two hosts; `add` runs one micro-batch."""

    def run(fabric):
        storage = MemoryStorage(SumSizes(STAGES, None), fabric)

        def begin(key):
            return Beginning(1, assembly.begin(key, 1, None))

        sums = RankSums(STAGES, fabric.neighbours, storage, begin, together=True)
        assembly = HostAssembly(STAGES, fabric, sums)

        def add(gradients):
            for key, gradient in gradients.items():
                sums.add(key, gradient)
            sums.end_micro_batch()
            sums.finish()

        found = program(fabric.host, sums, assembly, add)
        assembly.close()
        sums.close()
        return found

    return hosts(2, run)


def read(sums, assembly, key):
    assembly.before_reading(key, GENERATIONS, lambda each: sums.has(each, 1))
    return sums.storage.read(key).clone() if sums.has(key, 1) else None


def test_every_host_reads_the_same_sum():
    def program(host, sums, assembly, add):
        add({KEYS[0]: torch.full((4,), host + 1.0)})
        return read(sums, assembly, KEYS[0])

    assert all(torch.equal(found, torch.full((4,), 3.0)) for found in on_hosts(program))


def test_a_sum_of_one_host_reaches_all_hosts_and_an_empty_sum_reaches_no_host():
    def program(host, sums, assembly, add):
        add({KEYS[0]: torch.ones(4)} if host == 1 else {})
        return read(sums, assembly, KEYS[0]), read(sums, assembly, KEYS[1])

    for first, second in on_hosts(program):
        assert torch.equal(first, torch.ones(4)) and second is None


def test_gradients_that_are_added_after_a_reading_count_once():
    def program(host, sums, assembly, add):
        add({KEYS[0]: torch.full((4,), 1.0)})
        first = read(sums, assembly, KEYS[0])
        again = read(sums, assembly, KEYS[0])  # sends nothing
        add({KEYS[0]: torch.full((4,), 10.0)})
        return first, again, read(sums, assembly, KEYS[0])

    for first, again, second in on_hosts(program):
        assert torch.equal(first, torch.full((4,), 2.0)) and torch.equal(again, first)
        assert torch.equal(second, torch.full((4,), 22.0))


def test_one_rank_cannot_assemble_the_sum_of_all_hosts(monkeypatch):
    monkeypatch.setattr(membership.joined, "value", object())

    def program(host, sums, assembly, add):
        add({KEYS[0]: torch.ones(4)})
        with membership.alone("step closure"), pytest.raises(StreamError, match="a gradient is requested"):
            read(sums, assembly, KEYS[0])
        return read(sums, assembly, KEYS[0])

    assert all(torch.equal(found, torch.full((4,), 2.0)) for found in on_hosts(program))
    monkeypatch.undo()
