"""The propagation of updates between ranks of one host, which are threads here."""

import torch
from thread_fabric import ranks

from headwater.core.placement import Placement
from headwater.core.stage import ParamSpec, StageSpec
from headwater.store.layout import StageLayout
from headwater.store.memory import MemoryTier
from headwater.store.ownership import Ownership
from headwater.store.propagation import Propagation
from headwater.store.scalars import OptimizerScalars

SIZE = 3
STAGE = StageSpec(0, "stage0", tuple(
    ParamSpec(f"w{index}", (8,), torch.float32, torch.float32) for index in range(SIZE)
))  # fmt: skip


def on_ranks(program):
    def run(fabric):
        layout = StageLayout(STAGE, [{} for _ in STAGE.params], elementwise=True)
        ownership = Ownership([layout], fabric.rank, Placement(SIZE), fabric.hosts, on_disk=())
        propagation = Propagation(fabric, ownership, MemoryTier([layout], fabric=fabric))
        try:
            return program(fabric, ownership, propagation)
        finally:
            propagation.close()

    return ranks(SIZE, run)


def test_a_rank_waits_until_all_owners_have_applied_the_update():
    def program(fabric, ownership, propagation):
        memory = fabric.allocate(SIZE)
        memory[fabric.rank] = 1  # what the update writes
        propagation.updated(0, 1)
        waited_for = propagation.wait(0)
        return waited_for, memory[:SIZE].sum().item()

    assert on_ranks(program) == [(1, SIZE)] * SIZE


def test_a_rank_does_not_wait_for_updates_after_the_named_commit():
    def program(fabric, ownership, propagation):
        if fabric.rank == 0:
            propagation.skipped(0, 5)
            return propagation.wait(0, up_to=4)
        return 0

    assert on_ranks(program) == [0] * SIZE


def test_ranks_exchange_the_scalars_of_the_parameters_that_they_update():
    def program(fabric, ownership, propagation):
        scalars = OptimizerScalars([STAGE], ownership, fabric)
        mine = [{"step": fabric.rank} if ownership.is_first_of_mine(0, p) else None for p in range(SIZE)]
        scalars.by_stage[0] = mine
        scalars.share()
        return scalars.by_stage[0]

    assert on_ranks(program) == [[{"step": rank} for rank in range(SIZE)]] * SIZE
