"""The gradients of a single rank, in memory and on disk: sums, borrowed sums and undone steps."""

import pytest
import torch

from headwater.core.stage import ParamSpec, StageSpec
from headwater.fabric.fabric import ALONE
from headwater.store.build import GradientOptions, make_gradients
from headwater.store.gradients.loans import Loans

STAGES = [
    StageSpec(stage, f"stage{stage}", tuple(
        ParamSpec(f"stage{stage}.{name}", (4,), torch.float32, torch.float32) for name in "ab"
    ))
    for stage in range(2)
]  # fmt: skip
KEYS = [(0, 0), (0, 1), (1, 0), (1, 1)]


@pytest.fixture(params=["memory", "disk"])
def gradients(request, tmp_path):
    options = GradientOptions(folder=None if request.param == "memory" else tmp_path, verify=True)
    made = make_gradients(STAGES, ALONE, lambda *_: range(0), options)
    yield made
    made.close()


def fill(gradients, factor=1.0, keys=KEYS):
    for number, key in enumerate(keys):
        gradients.add(key, torch.full((4,), factor * (number + 1)), last=True)
    gradients.end_micro_batch()


def test_micro_batches_are_summed_and_measured(gradients):
    fill(gradients)
    fill(gradients, 10.0)
    gradients.complete()
    expected = [torch.full((4,), 11.0 * (number + 1)) for number in range(4)]
    assert gradients.status.present == set(KEYS)
    assert torch.equal(
        gradients.norm(KEYS), torch.linalg.vector_norm(torch.stack([t.norm() for t in expected]))
    )
    gradients.commit(KEYS, (0, 1))
    assert not gradients.status.present
    assert all(torch.equal(a, b) for a, b in zip(gradients.take(0), expected[:2], strict=True))
    assert gradients.take(0) is None


def test_changes_of_a_borrowed_sum_reach_norm_and_update(gradients):
    fill(gradients)
    gradients.complete()
    gradients.norm(KEYS)
    lent = gradients.borrow((0, 1))
    lent.mul_(3)
    assert torch.equal(gradients.norm([(0, 1)]), torch.full((4,), 6.0).norm())
    gradients.commit(KEYS, (0, 1))
    taken = gradients.take(0)
    assert torch.equal(taken[1], torch.full((4,), 6.0))
    taken[1].zero_()
    assert torch.equal(
        lent, torch.full((4,), 6.0)
    )  # the update does not change the sum that the loop borrowed


def test_unused_gradients_can_be_put_back(gradients):
    fill(gradients)
    gradients.complete()
    gradients.commit(KEYS[:1], (0, 1))
    taken = gradients.take(0)
    gradients.put_back(0, [None, taken[1]])
    assert torch.equal(gradients.borrow((0, 1)), torch.full((4,), 2.0))


def test_a_gradient_for_a_consumed_sum_is_ignored_until_it_is_dropped(gradients):
    fill(gradients)
    gradients.commit(KEYS, (0, 1))
    gradients.status.consume(KEYS[:1])
    fill(gradients)
    assert gradients.borrow(KEYS[0]) is None
    gradients.drop(KEYS[0])
    fill(gradients)
    assert gradients.borrow(KEYS[0]) is not None


def test_sums_can_be_replaced_and_multiplied(gradients):
    fill(gradients)
    gradients.replace((1, 0), torch.ones(4))
    gradients.multiply((1, 0), lambda: torch.full((4,), 5.0))
    gradients.multiply((9, 9), lambda: pytest.fail("there is no such sum"))
    assert torch.equal(gradients.borrow((1, 0)), torch.full((4,), 5.0))


def test_an_undone_step_restores_the_earlier_sums(gradients):
    fill(gradients, keys=KEYS[:3])
    gradients.remember()
    for key in KEYS[:2]:
        gradients.borrow(key).mul_(7)
    fill(gradients, 100.0)
    gradients.restore((), (), ())
    assert gradients.status.present == set(KEYS[:3])
    for number, key in enumerate(KEYS[:3]):
        assert torch.equal(gradients.borrow(key), torch.full((4,), number + 1.0))
    assert gradients.borrow(KEYS[3]) is None


def test_sums_that_were_committed_and_stay_committed_are_not_restored(gradients):
    fill(gradients)
    gradients.remember(KEYS[:2])
    assert gradients.status.remembered == set(KEYS[:2])
    gradients.commit(KEYS[:1], (0, 1))
    gradients.restore(taken=set(), waiting=set(KEYS[:1]), undone=set())
    assert gradients.status.present == {KEYS[1]}
    assert torch.equal(gradients.take(0)[0], torch.ones(4))  # for the update that waits


def test_a_step_that_begins_drops_all_sums(gradients):
    fill(gradients)
    gradients.status.consume([KEYS[0]])
    gradients.discard()
    assert not gradients.status.present and not gradients.status.consumed
    assert gradients.take(0) is None


def test_memory_of_gradients_is_kept_only_while_the_loop_can_reach_it():
    loans = Loans()
    whole = torch.zeros(6)
    loans.end(0, {param: part.detach() for param, part in enumerate(whole.split(2))})
    assert loans.last((0, 1)).data_ptr() == whole[2:].data_ptr()
    del whole
    assert loans.last((0, 1)) is None


def test_memory_that_only_the_store_has_is_not_kept():
    loans = Loans()
    loans.end(0, {param: part.detach() for param, part in enumerate(torch.zeros(6).split(2))})
    assert loans.last((0, 1)) is None
