"""Slabs are filled ahead of use, with work for each use that does not grow with the number of stages."""

import pytest
import torch

from headwater.core.stage import ParamSpec, StageSpec
from headwater.core.streams import IMMEDIATE
from headwater.store.ledger import Ledger
from headwater.stream.device import CpuDevice
from headwater.stream.weights import InPlaceWeights, MixedWeights, SlabWeights


class Store:
    """A store whose images have the number of their stage; it counts the questions for versions."""

    def __init__(self):
        self.ledger, self.tier = Ledger(), self
        self.questions = 0
        self.fetched = []

    def resident_wire(self, stage):
        return None

    def on_device(self, stage):
        return None

    def version(self, stage):
        self.questions += 1
        return 0

    def fetch(self, stage, into, up_to, stream=IMMEDIATE):
        self.fetched.append(stage)
        into[:64].view(torch.float32).fill_(stage)


def weights_of(num_stages, num_slabs):
    spec = ParamSpec("w", (16,), torch.float32, torch.float32)
    stages = [StageSpec(index, f"s{index}", (spec,)) for index in range(num_stages)]
    store = Store()
    return SlabWeights(store, stages, num_slabs, CpuDevice()), store


def use(weights, stage):
    assert weights.require(stage)[:64].view(torch.float32).unique().item() == stage
    weights.allow_eviction()


@pytest.mark.parametrize("slabs", [3, 1000], ids=["few slabs", "a slab for each stage"])
def test_the_work_for_a_use_does_not_grow_with_the_number_of_stages(slabs):
    questions = []
    for num_stages in (20, 80):
        weights, store = weights_of(num_stages, slabs)
        weights.begin([*range(num_stages), *reversed(range(num_stages))])
        for stage in range(num_stages - 1):
            use(weights, stage)
        store.questions = 0
        use(weights, num_stages - 1)
        questions.append(store.questions)
        weights.close()
    assert questions[0] == questions[1]


@pytest.mark.parametrize("repeats", [False, True], ids=["step", "inference"])
def test_every_stage_is_fetched_once_before_its_use(repeats):
    weights, store = weights_of(6, 3)
    weights.begin(range(6), repeats=repeats)
    for stage in range(6):
        use(weights, stage)
    assert store.fetched[:6] == list(range(6))
    assert (weights.statistics.hits, weights.statistics.misses) == (6, 0)
    weights.close()
    assert len(store.fetched) == 6 or repeats


class MixedStore(Store):
    """A store with stage 1 in memory."""

    def resident_wire(self, stage):
        return torch.ones(16) if stage == 1 else None

    def fetch(self, stage, into=None, up_to=None, stream=IMMEDIATE):
        if into is not None:
            super().fetch(stage, into, up_to)


def test_a_stage_in_memory_is_used_while_the_next_stages_are_fetched():
    spec = ParamSpec("w", (16,), torch.float32, torch.float32)
    stages, store = [StageSpec(index, f"s{index}", (spec,)) for index in range(5)], MixedStore()
    slabs = SlabWeights(store, stages, 2, CpuDevice(), in_place={1})
    weights = MixedWeights({1}, InPlaceWeights(store, CpuDevice()), slabs)
    weights.begin(range(5))
    use(weights, 0)
    assert weights.require(1).tolist() == [1] * 16
    for slab in slabs._pool.slabs:
        slab.ready.result(timeout=200)
    assert store.fetched == [0, 2, 3]
    for stage in (2, 3, 4):
        use(weights, stage)
    assert (weights.statistics.hits, weights.statistics.misses) == (5, 0)
    weights.close()
