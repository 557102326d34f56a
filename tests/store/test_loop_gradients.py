"""Gradient sums of several ranks that a loop reads, changes, commits and undoes, as on one rank.

The ranks are threads of one process, or processes that believe to be on two hosts.
"""

import numpy as np
import pytest
import torch
from tests.rank_processes import run_ranks
from thread_fabric import ranks
from torch.utils._pytree import tree_map_only

from headwater.core.stage import ParamSpec, StageSpec
from headwater.store.gradients.lasting import LastingSums
from headwater.store.gradients.loop import LoopGradients
from headwater.store.gradients.sizes import SumSizes
from headwater.store.gradients.storage import DiskStorage, MemoryStorage

SIZE = 3
STAGES = [
    StageSpec(stage, f"stage{stage}", tuple(
        ParamSpec(f"stage{stage}.{name}", (4,), torch.float32, torch.float32) for name in "ab"
    ))
    for stage in range(2)
]  # fmt: skip
KEYS = [(0, 0), (0, 1), (1, 0), (1, 1)]


def gradient(rank, key, micro_batch=0):
    return torch.full((4,), float(100 * micro_batch + 10 * rank + 2 * key[0] + key[1]))


def total(key, micro_batch=0):
    return sum(gradient(rank, key, micro_batch) for rank in range(SIZE))


def backward(sums, rank, micro_batch=0, keys=KEYS):
    for key in reversed(keys):
        sums.add(key, gradient(rank, key, micro_batch), last=True)
    sums.end_micro_batch()


@pytest.fixture(params=[(1, "memory"), (2, "memory"), (2, "disk")], ids=lambda case: f"{case[0]} {case[1]}")
def on_ranks(request, tmp_path):
    """Return a function that calls `program(sums, rank)` on each rank and returns the results."""

    hosts, tier = request.param

    def make_sums(fabric):
        sizes = SumSizes(STAGES, None)
        if tier == "memory":
            return MemoryStorage(sizes, fabric)
        return DiskStorage(STAGES, sizes, fabric, tmp_path, verify=True)

    def start(program):
        def run(fabric):
            lasting = LastingSums(STAGES, fabric, make_sums(fabric))
            sums = LoopGradients(STAGES, fabric.neighbours, lasting)
            try:
                return tree_map_only(torch.Tensor, torch.Tensor.numpy, program(sums, fabric.rank))
            finally:
                sums.close()

        found = ranks(SIZE, run) if hosts == 1 else run_ranks(run, SIZE, hosts)
        return tree_map_only(np.ndarray, torch.tensor, found)

    return start


def test_every_rank_reads_the_sum_of_all_and_can_add_to_it(on_ranks):
    def program(sums, rank):
        assert sums.borrow((0, 0)) is None
        backward(sums, rank)
        first = [sums.borrow(key).clone() for key in KEYS]
        backward(sums, rank, 1)
        backward(sums, rank, 2, KEYS[:1])
        return first, [sums.borrow(key).clone() for key in KEYS]

    for first, second in on_ranks(program):
        for key, one, three in zip(KEYS, first, second, strict=True):
            assert torch.equal(one, total(key))
            more = total(key, 2) if key == KEYS[0] else 0
            assert torch.equal(three, total(key) + total(key, 1) + more)


def test_equal_changes_on_all_ranks_reach_norm_and_update(on_ranks):
    def program(sums, rank):
        backward(sums, rank)
        sums.borrow((0, 0)).mul_(0.5)
        sums.replace((0, 1), torch.ones(4))
        backward(sums, rank, 1)
        seen = [sums.borrow(key) for key in KEYS[:2]]
        seen[0].neg_()
        sums.complete()
        norm = sums.norm(KEYS)
        sums.commit(KEYS, (0, 1))
        lent = seen[0].clone()
        taken = [sums.take(stage) for stage in range(2)]
        taken[0][0].zero_()  # as an update may do
        assert torch.equal(seen[0], lent)
        return norm, taken[0][1], taken[1][0]

    expected = [-(total((0, 0)) / 2 + total((0, 0), 1)), 1 + total((0, 1), 1)]
    expected += [total(key) + total(key, 1) for key in KEYS[2:]]
    for norm, replaced, untouched in on_ranks(program):
        torch.testing.assert_close(norm, torch.linalg.vector_norm(torch.cat(expected)))
        assert torch.equal(replaced, expected[1]) and torch.equal(untouched, expected[2])


def test_some_gradients_may_be_committed_while_others_accumulate(on_ranks):
    def program(sums, rank):
        backward(sums, rank)
        sums.complete()
        sums.commit(KEYS[:1], (0, 1))
        sums.status.consume(KEYS[:1])
        assert sums.take(1) is None
        taken = sums.take(0)
        assert torch.equal(taken[0], total(KEYS[0])) and taken[1] is None
        backward(sums, rank, 1)  # ignored for the sum that a step has consumed and no rank has dropped
        assert sums.borrow(KEYS[0]) is None
        sums.drop(KEYS[0])
        sums.drop(KEYS[1])
        backward(sums, rank, 2)
        return [sums.borrow(key).clone() for key in KEYS]

    for found in on_ranks(program):
        assert torch.equal(found[0], total(KEYS[0], 2)) and torch.equal(found[1], total(KEYS[1], 2))
        assert torch.equal(found[2], sum(total(KEYS[2], number) for number in range(3)))


@pytest.mark.parametrize("looked", [False, True])
def test_an_undone_step_restores_the_sums_of_all_ranks(on_ranks, looked):
    def program(sums, rank):
        backward(sums, rank, keys=KEYS[:2])
        if looked:
            sums.borrow((0, 0)).mul_(2)
        sums.remember()
        assert sums.status.remembered == {(0, 0), (0, 1)}
        backward(sums, rank, 1)
        sums.add((1, 1), gradient(rank, (1, 1), 2), last=True)  # interrupted
        sums.restore((), (), ())
        before = [sums.borrow(key) for key in KEYS]
        before = [None if each is None else each.clone() for each in before]
        backward(sums, rank, 3)
        sums.complete()
        return before, [sums.borrow(key).clone() for key in KEYS]

    factor = 2 if looked else 1
    for before, after in on_ranks(program):
        assert torch.equal(before[0], factor * total((0, 0))) and torch.equal(before[1], total((0, 1)))
        assert before[2] is None and before[3] is None
        assert torch.equal(after[0], factor * total((0, 0)) + total((0, 0), 3))
        assert torch.equal(after[3], total((1, 1), 3))


def test_every_rank_finds_a_non_finite_gradient(on_ranks):
    def program(sums, rank):
        backward(sums, rank)
        sums.add((1, 0), torch.full((4,), float("nan") if rank == 1 else 1.0), last=True)
        sums.end_micro_batch()
        sums.complete()
        return sums.status.first_bad, bool(sums.norm(KEYS).isfinite())

    assert on_ranks(program) == [(1, False)] * SIZE


def test_every_rank_finds_a_gradient_that_only_one_rank_has(on_ranks):
    def program(sums, rank):
        backward(sums, rank, keys=KEYS[:1] if rank == SIZE - 1 else [])
        found = sums.borrow(KEYS[0]).clone()
        backward(sums, rank, 1, keys=KEYS[:1] if rank == 0 else [])
        return found, sums.borrow(KEYS[0]).clone(), sums.borrow(KEYS[1])

    for first, both, other in on_ranks(program):
        assert torch.equal(first, gradient(SIZE - 1, KEYS[0]))
        assert torch.equal(both, first + gradient(0, KEYS[0], 1))
        assert other is None
