"""The gradients of `train_step` with several ranks of one host, which are threads here."""

import threading
import time

import pytest
import torch
from thread_fabric import ranks

from headwater.core.stage import ParamSpec, StageSpec
from headwater.store.build import GradientOptions, make_gradients
from headwater.store.gradients.port import EditableGradients

SIZE = 3
STAGES = [
    StageSpec(0, "stage0", tuple(
        ParamSpec(f"stage0.{name}", (4,), torch.float32, torch.float32) for name in "ab"
    ))
]  # fmt: skip
A, B = (0, 0), (0, 1)


def on_ranks(program, folder=None):
    def run(fabric):
        gradients = make_gradients(STAGES, fabric, lambda *_: range(4), GradientOptions(folder=folder))
        try:
            return program(gradients, fabric.rank)
        finally:
            gradients.close()

    return ranks(SIZE, run)


@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_all_ranks_get_the_sum_added_in_rank_order(tier, tmp_path):
    parts = [torch.tensor([1e8, 1.0, -1e8, 0.1]), torch.tensor([1.0, 1e8, 0.3, 1e8]), torch.full((4,), -1e8)]

    def program(gradients, rank):
        gradients.discard()
        gradients.add(A, parts[rank].clone(), last=True)
        if rank == 2:
            gradients.add(B, torch.ones(4), last=True)
        gradients.end_micro_batch()
        gradients.complete()
        norm = gradients.norm([A, B])
        gradients.commit([A, B], [0])
        return norm, gradients.take(0)

    expected = (parts[0] + parts[1]) + parts[2]
    for norm, (first, second) in on_ranks(program, None if tier == "memory" else tmp_path):
        assert torch.equal(first, expected) and torch.equal(second, torch.ones(4))
        assert torch.equal(norm, torch.stack([expected.norm(), torch.ones(4).norm()]).norm())


def test_a_second_gradient_of_a_micro_batch_is_added_after_the_first_ones_of_all_ranks():
    def program(gradients, rank):
        gradients.discard()
        for value in (1.0, 10.0, 100.0):
            gradients.add(A, torch.full((4,), value * (rank + 1)), last=True)
        gradients.end_micro_batch()
        gradients.complete()
        return gradients.borrow(A)

    for found in on_ranks(program):
        assert torch.equal(found, torch.full((4,), 666.0))


def test_a_new_step_begins_with_empty_sums_and_masks_multiply_once():
    def program(gradients, rank):
        for step in range(2):
            gradients.discard()
            gradients.add(A, torch.full((4,), float(step + 1)), last=True)
            gradients.end_micro_batch()
            gradients.complete()
            gradients.multiply(A, lambda: torch.tensor([1.0, 0.0, 1.0, 0.0]))
            gradients.complete()
        assert not isinstance(gradients, EditableGradients)
        return gradients.borrow(A), gradients.norm([A]), gradients.status.present

    for found, norm, present in on_ranks(program):
        assert torch.equal(found, torch.tensor([6.0, 0.0, 6.0, 0.0]))
        assert torch.equal(norm, found.norm()) and present == {A}


def test_every_rank_knows_of_a_non_finite_sum():
    def program(gradients, rank):
        gradients.discard()
        gradients.add(A, torch.full((4,), float("inf") if rank == 1 else 1.0), last=True)
        gradients.end_micro_batch()
        gradients.complete()
        return gradients.status.first_bad

    assert on_ranks(program) == [0] * SIZE


def test_a_dropped_sum_stays_dropped_until_the_next_step():
    def program(gradients, rank):
        found = []
        for drops in (True, False):
            gradients.discard()
            for key in (A, B):
                gradients.add(key, torch.ones(4), last=True)
            gradients.end_micro_batch()
            gradients.complete()
            if drops:
                gradients.drop(A)
            gradients.complete()
            found.append(set(gradients.status.present))
        return found

    assert on_ranks(program) == [[{B}, {A, B}]] * SIZE


def test_a_rank_that_begins_the_next_step_changes_nothing_for_a_slower_rank():
    has_added = threading.Event()

    def program(gradients, rank):
        if rank == 1:
            publish = gradients.publish

            def late(*args):
                has_added.wait(10)
                publish(*args)

            gradients.publish = late
        present = []
        for step in range(2):
            gradients.discard()
            gradients.add(A, torch.ones(4), last=True)
            if (step, rank) == (1, 0):
                while not gradients.sums.has(A, 2):
                    time.sleep(1e-4)
                has_added.set()
            gradients.end_micro_batch()
            gradients.complete()
            present.append(set(gradients.status.present))
        return present

    assert on_ranks(program) == [[{A}, {A}]] * SIZE
