"""The update of one stage uses its gradients, its bytes and its scalars, and keeps unused gradients."""

import pytest
import torch
from thread_fabric import ranks

from headwater.core.buffers import aligned_empty
from headwater.core.stage import ParamSpec, StageSpec
from headwater.optim.spec import OptimizerSpec
from headwater.store.build import GradientOptions, build_store
from headwater.store.disk import DiskTier
from headwater.store.layout import GROUP_BYTES, PIECE_ELEMENTS
from headwater.store.memory import MemoryTier
from headwater.store.rule import UpdateRule
from headwater.store.stage_update import StageUpdate
from headwater.store.update import Part, Pending, Update
from headwater.store.updater import Updater

STAGE = StageSpec(0, "s", tuple(ParamSpec(n, (4,), torch.float32, torch.float32) for n in "ab"))
MOMENTUM = OptimizerSpec("SGD", {"lr": 1.0, "momentum": 0.5})
PART = Part(1, Update(1, {"lr": 1.0}), None)


@pytest.fixture(params=["memory", "disk"])
def store(request, tmp_path):
    def make_tier(own):
        return MemoryTier(own.layouts) if request.param == "memory" else DiskTier(own.layouts, tmp_path)

    made = build_store(
        [STAGE], UpdateRule(MOMENTUM), make_tier, on_disk=[0] if request.param == "disk" else ()
    )
    made.parameters.write(0, lambda piece: piece.master.zero_())
    yield made
    made.close()


def updates_of(store):
    return StageUpdate(Updater(store.rule), store.tier, store.ownership, store.gradients, store.scalars)


def add(store, *params):
    for param in params:
        store.gradients.add((0, param), torch.full((4,), param + 1.0), last=True)
    store.gradients.end_micro_batch()


def apply(store, *params):
    buffer = aligned_empty(store.tier.layouts[0].wire_bytes)
    updates_of(store).apply(0, Pending(1, dict.fromkeys(params, PART)), buffer)


def test_an_update_changes_masters_and_scalars_and_leaves_no_gradient(store):
    add(store, 0, 1)
    apply(store, 0, 1)
    assert store.parameters.read_param((0, 0)).tolist() == [-1.0] * 4
    assert store.parameters.read_param((0, 1)).tolist() == [-2.0] * 4
    assert store.parameters.read_param((0, 1), "momentum_buffer").tolist() == [2.0] * 4
    assert store.scalars.by_stage[0] == [{}, {}]
    assert store.gradients.take(0) is None


def test_a_gradient_that_the_commit_does_not_name_stays(store):
    add(store, 0, 1)
    apply(store, 1)
    assert store.parameters.read_param((0, 0)).tolist() == [0.0] * 4
    left = store.gradients.take(0)
    assert left[0].tolist() == [1.0] * 4 and left[1] is None


def test_an_update_without_gradients_is_a_fault_of_the_program(store):
    with pytest.raises(AssertionError, match="committed without gradients"):
        apply(store, 0)


def test_a_rank_keeps_no_gradient_whose_last_piece_another_rank_updates():
    count = GROUP_BYTES // 4 + PIECE_ELEMENTS  # two groups of momentum
    stage = StageSpec(0, "s", (ParamSpec("w", (count,), torch.float32, torch.float32),))

    def program(fabric):
        make_tier = lambda own: MemoryTier(own.layouts, fabric=fabric)  # noqa: E731
        options = GradientOptions(user_loop=True)
        store = build_store([stage], UpdateRule(MOMENTUM), make_tier, gradients=options, fabric=fabric)
        store.parameters.write(0, lambda piece: piece.master.zero_())
        store.add_gradient((0, 0), torch.ones(count), last=True)
        store.end_micro_batch()
        store.commit(Update(1, {"lr": 1.0}))
        store.flush()
        left = store.gradients.take(0)
        fabric.barrier("the end")
        store.close()
        return left

    assert ranks(2, program) == [None, None]
