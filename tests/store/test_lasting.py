"""Sums that last over steps: reading one replaces it by a copy, which is put back before more is added."""

import gc

import torch
from thread_fabric import ranks

from headwater.core.stage import ParamSpec, StageSpec
from headwater.store.gradients.lasting import LastingSums
from headwater.store.gradients.sizes import SumSizes
from headwater.store.gradients.storage import MemoryStorage

STAGES = [StageSpec(0, "s", tuple(ParamSpec(n, (3,), torch.float32, torch.float32) for n in "ab"))]
KEY, OTHER = (0, 0), (0, 1)


def on_ranks(program):
    """Return the results of `program(sums, rank)` on two ranks of one host."""

    def run(fabric):
        sums = LastingSums(STAGES, fabric, MemoryStorage(SumSizes(STAGES, None), fabric))
        found = program(sums, fabric.rank)
        fabric.barrier("the end")
        sums.close()
        return found

    return ranks(2, run)


def add(sums, value):
    sums.shared.add(KEY, torch.full((3,), float(value)))
    sums.shared.end_micro_batch()


def test_a_sum_has_the_gradients_of_all_ranks_until_it_is_given_up():
    def program(sums, rank):
        add(sums, 1 + rank)
        first = sums.find(), sums.value(KEY).tolist()
        sums.give_up(KEY)
        return first, sums.find()

    assert on_ranks(program) == [(({KEY}, [3.0] * 3), set())] * 2


def test_a_change_of_a_lent_copy_counts_when_more_is_added():
    def program(sums, rank):
        add(sums, 1)
        sums.lend(KEY).mul_(10)
        assert sums.is_copied(KEY) and sums.shared.whole(KEY).tolist() == [2.0] * 3
        add(sums, 1)
        assert not sums.is_copied(KEY)
        assert sums.has(KEY)
        return sums.value(KEY).tolist()

    assert on_ranks(program) == [[22.0] * 3] * 2


def test_a_missing_sum_is_not_lent():
    assert on_ranks(lambda sums, rank: sums.lend(OTHER)) == [None, None]


def test_the_sum_that_an_update_takes_is_not_the_tensor_that_the_loop_still_has():
    def program(sums, rank):
        add(sums, 1)
        lent = sums.lend(KEY)
        taken = sums.take(KEY)
        return taken.data_ptr() != lent.data_ptr(), torch.equal(taken, lent), sums.find()

    assert on_ranks(program) == [(True, True, set())] * 2


def test_a_copy_that_the_loop_has_dropped_is_taken_without_another_copy():
    def program(sums, rank):
        add(sums, 1)
        address = sums.lend(KEY).data_ptr()
        gc.collect()
        return sums.take(KEY).data_ptr() == address

    assert on_ranks(program) == [True, True]


def test_a_replaced_sum_is_the_given_value():
    def program(sums, rank):
        add(sums, 1)
        sums.has(KEY)
        sums.replace(KEY, torch.full((3,), 7.0))
        add(sums, 1)
        sums.has(KEY)
        return sums.value(KEY).tolist()

    assert on_ranks(program) == [[9.0] * 3] * 2
