"""Slabs that several ranks share: every rank sees the weights that it requested, whatever the others do."""

import atexit
import dataclasses
import functools
import random
import threading
import time

import pytest
import torch
from harness import FP32
from rank_training import masters, plan_of, train
from tests.rank_processes import run_ranks

from headwater.core.errors import DiskFullError, StreamError
from headwater.core.precision import Precision
from headwater.core.stage import ParamSpec, StageSpec
from headwater.core.streams import IMMEDIATE
from headwater.fabric.fabric import ALONE
from headwater.plan.types import Activations
from headwater.store.ledger import Ledger
from headwater.stream.borrowed import BorrowedWeights
from headwater.stream.device import CpuDevice
from headwater.stream.weights import SlabWeights


@functools.cache
def in_memory(precision, micro_batches):
    """Return the results of two ranks with weights in memory."""
    plan = plan_of(precision, micro_batches)
    return run_ranks(lambda fabric: train(fabric, plan, micro_batches, read=masters))


@pytest.mark.parametrize(
    ("precision", "micro_batches", "slabs", "policy"),
    [
        (FP32, 1, 8, Activations.KEEP),
        (FP32, 1, 4, Activations.RECOMPUTE),
        (Precision("bf16"), 2, 4, Activations.KEEP),
    ],
)
def test_the_disk_tier_equals_the_memory_tier(precision, micro_batches, slabs, policy, tmp_path):
    plan = plan_of(precision, micro_batches)
    activations = tuple(
        policy if stage.name.startswith("blocks") else Activations.KEEP for stage in plan.trace.stages
    )
    changes = {"tier": "disk", "in_place": False, "disk": tmp_path}
    plan = dataclasses.replace(plan, slabs=slabs, activations=activations, **changes)
    wanted = in_memory(precision, micro_batches)
    found = run_ranks(lambda fabric: train(fabric, plan, micro_batches, read=masters))
    assert found[0][0] == found[1][0] == wanted[0][0]
    for name, value in wanted[0][1].items():
        assert (found[0][1][name] == value).all(), name
    assert not list(tmp_path.iterdir()), "files of the disk tier have no names"


# random schedules

STAGES = [
    StageSpec(index, f"stage{index}", (ParamSpec("w", (size,), torch.float32, torch.float32),))
    for index, size in enumerate([64] + 7 * [256] + 4 * [32])
]


class Numbers:
    """A stand-in for a store: the image of a stage is its number and version, read with delays."""

    def __init__(self, rank, failing=None):
        self.versions = [1] * len(STAGES)
        self.tier, self.ledger = self, Ledger()
        self._random = random.Random(rank)
        self._failing = failing

    def version(self, stage):
        return self.versions[stage]

    def resident_wire(self, stage):
        return None

    def on_device(self, stage):
        return None

    def fetch(self, stage, into, up_to, stream=IMMEDIATE):
        if stage == self._failing:
            raise DiskFullError("there is no room")
        into[:128] = 255  # a rank that used the slab during the copy would see this value
        time.sleep(self._random.choice([0, 0, 0.001]))
        into[:128].view(torch.int64)[:] = 1000 * stage + self.versions[stage]


def make_weights(fabric, store, slabs):
    if fabric.local_rank == 0:
        return SlabWeights(store, STAGES, slabs, CpuDevice(), fabric)
    return BorrowedWeights(store, STAGES, slabs, fabric)


def wander(fabric, seed, slabs):
    """Run schedules in which each rank skips different uses and holds views for a while."""
    shared, own = random.Random(seed), random.Random(f"{seed} {fabric.rank}")
    store = Numbers(fabric.rank)
    weights = make_weights(fabric, store, slabs)
    for _ in range(5):
        there = [shared.randrange(len(STAGES)) for _ in range(10)]
        weights.begin(there + there[::-1])
        before = None
        for stage in there + there[::-1]:
            if own.random() < 0.3:
                continue
            image = weights.require(stage)
            view, wanted = image[:128].view(torch.int64), 1000 * stage + store.version(stage)
            time.sleep(own.choice([0, 0, 0, 0.002]))
            for values, number in filter(None, (before, (view, wanted))):
                assert (values == number).all(), f"{values[0]} in place of {number}"
            before = (view, wanted) if own.random() < 0.5 else None
            del image, view, values
        before = None
        weights.allow_eviction()
        fabric.barrier("the end of the step")
        for stage in range(len(STAGES)):
            store.versions[stage] += shared.random() < 0.7
    fabric.barrier("the last step")
    held = weights._directory._holds[:].sum()
    fabric.barrier("holds to be looked at")
    weights.close()
    return int(held), weights.statistics


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("more", [0, 2])
def test_no_rank_computes_with_a_slab_that_is_being_filled(ranks, more):
    for held, _ in run_ranks(lambda fabric: wander(fabric, ranks + more, 2 * ranks + more), ranks):
        assert held == 0, "a rank at rest holds nothing"


def test_a_stage_is_read_once_for_all_ranks():
    def pass_through(fabric):
        weights = make_weights(fabric, Numbers(fabric.rank), len(STAGES))
        weights.begin(range(len(STAGES)))
        for stage in range(len(STAGES)):
            weights.require(stage)
        weights.allow_eviction()
        fabric.barrier("the end")
        weights.close()
        return weights.statistics.bytes_in

    assert run_ranks(pass_through) == [sum(stage.slab_bytes for stage in STAGES), 0]


def test_a_read_error_of_the_leader_is_raised_on_the_waiting_rank():
    def ask(fabric):
        weights = make_weights(fabric, Numbers(fabric.rank, failing=3), 4)
        message = ""
        if fabric.rank == 1:
            with pytest.raises(StreamError) as error:
                weights.require(3)
            message = error.value.what
        fabric.barrier("the error")
        weights.close()
        return message

    assert run_ranks(ask)[1] == "stage 'stage3' cannot be read: there is no room"


class WithoutServer(Numbers):
    """A store that raises an error on the thread that serves other ranks."""

    def version(self, stage):
        if threading.current_thread().name == "headwater-serve":
            raise MemoryError("no memory")
        return super().version(stage)


def test_an_error_of_the_serving_thread_is_raised_on_every_rank():
    def ask(fabric):
        weights = make_weights(fabric, WithoutServer(fabric.rank), 4)
        if fabric.rank == 1:
            with pytest.raises(StreamError) as error:
                weights.require(3)
        fabric.barrier("the error of the rank that waits")
        if fabric.rank == 0:
            with pytest.raises(MemoryError) as error:
                weights.require(3)
        weights.close()
        return str(error.value)

    leader, other = run_ranks(ask)
    assert leader == "no memory"
    assert "the first rank of this host cannot fetch stages: MemoryError('no memory')" in other


def test_a_single_rank_needs_no_shared_slabs():
    assert wander(ALONE, 0, 2)[0] == 0


def has_server():
    return any(thread.name == "headwater-serve" for thread in threading.enumerate())


def serves_at_exit(fabric):
    """Return whether the thread for other ranks runs, before and after the handlers of Python's end."""
    weights = make_weights(fabric, Numbers(fabric.rank), 4)
    before = has_server()
    fabric.barrier("both ranks to have weights")
    if fabric.local_rank == 0:
        weights._loader.close()
    atexit._run_exitfuncs()
    return before, has_server()


def test_no_thread_serves_other_ranks_when_python_ends():
    assert run_ranks(serves_at_exit) == [(True, False), (False, False)]
