"""The status of gradient sums: present, consumed, sparse, measured."""

import torch

from headwater.store.gradients.norms import gradient_norm
from headwater.store.gradients.status import GradientStatus

A, B = (0, 0), (1, 0)


def test_a_sum_that_changes_has_no_norm_until_it_is_measured_again():
    status = GradientStatus()
    status.arrive(A, is_sparse=False)
    status.measure(A, torch.tensor(2.0))
    assert status.present == {A} and status.norms[A] == 2
    status.arrive(A, is_sparse=True)
    assert A not in status.norms and status.sparse == {A}
    status.arrive(A, is_sparse=False)
    assert not status.sparse


def test_the_first_non_finite_stage_is_recorded():
    status = GradientStatus()
    for key, norm in (((2, 0), 1.0), (B, float("nan")), (A, float("inf"))):
        status.measure(key, torch.tensor(norm))
    assert status.first_bad == 1
    status.leave_all()
    assert status.first_bad is None


def test_restoring_resets_the_present_and_consumed_sums():
    status = GradientStatus()
    status.arrive(A, is_sparse=False)
    status.arrive(B, is_sparse=False)
    status.consume([(5, 5)])
    status.remember(None)
    status.leave(A)
    status.consume([B])
    status.restore([B])
    assert status.present == {A} and status.consumed.keys() == {(5, 5)} and not status.remembered


def test_only_named_sums_that_are_present_are_remembered():
    status = GradientStatus()
    status.arrive(A, is_sparse=False)
    status.remember([A, B])
    assert status.remembered == {A}
    status.forget()
    assert not status.remembered


def test_the_global_norm_is_bit_identical_to_torch():
    gradients = [torch.randn(5, 7), torch.randn(3), torch.randn(2, 2, 2)]
    status = GradientStatus()
    for param, gradient in enumerate(gradients):
        status.measure((0, param), gradient_norm(gradient))
    assert torch.equal(status.norm(status.norms), torch.nn.utils.get_total_norm(gradients))
    assert torch.equal(status.norm([]), torch.zeros(()))


def test_the_global_norm_is_that_of_the_measured_norms():
    status = GradientStatus()
    for key, norm in (((0, 0), 3.0), ((0, 1), 4.0), ((1, 0), 12.0)):
        status.measure(key, torch.tensor(norm))
    assert status.norm([(0, 0), (0, 1)]).item() == 5.0
    assert status.norm(status.norms).item() == 13.0
    assert status.norm([]).item() == 0.0
