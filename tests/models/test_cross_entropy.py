"""The cross-entropy by blocks of rows has the bits of torch's."""

import pytest
import torch
from torch.nn import functional as F

from headwater import cross_entropy
from headwater.core.errors import ConfigError, RunError
from headwater.models import cross_entropy as module


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module._BLOCK_BYTES, "cpu", 1 << 14)


def inputs(rows: int, classes: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    targets = torch.randint(0, classes, (rows,))
    targets[::7] = -100
    return (3 * torch.randn(rows, classes)).to(dtype), targets


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(("rows", "classes"), [(9, 2), (513, 1_003), (5_000, 37)])
def test_loss_and_gradient_equal_those_of_torch(
    rows: int, classes: int, dtype: torch.dtype, reduction: str
) -> None:
    logits, targets = inputs(rows, classes, dtype)
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    loss = cross_entropy(ours, targets, reduction=reduction)
    expected = F.cross_entropy(theirs.float(), targets, reduction=reduction)
    assert torch.equal(loss, expected)
    (loss * 0.37).backward()
    (expected * 0.37).backward()
    assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]


def test_the_number_of_an_ignored_class_may_be_a_class() -> None:
    logits, targets = inputs(300, 100, torch.float32)
    targets = targets.clamp_min(0)
    loss = cross_entropy(logits, targets, ignore_index=0)
    assert torch.equal(loss, F.cross_entropy(logits, targets, ignore_index=0))


def test_without_a_row_that_counts_the_mean_is_nan_as_in_torch() -> None:
    logits, targets = inputs(300, 100, torch.float32)
    loss = cross_entropy(logits.requires_grad_(), torch.full_like(targets, -100))
    loss.backward()
    expected = logits.detach().clone().requires_grad_()
    F.cross_entropy(expected, torch.full_like(targets, -100)).backward()
    assert loss.isnan()
    assert torch.equal(logits.grad.isnan(), expected.grad.isnan())  # type: ignore[union-attr]


def test_second_derivatives_equal_those_of_torch() -> None:
    logits, targets = inputs(300, 100, torch.float64)
    second = []
    for loss_of in (
        cross_entropy,
        lambda logits, targets: F.cross_entropy(logits.float(), targets),
    ):
        point = logits.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(loss_of(point, targets), point, create_graph=True)
        second.append(torch.autograd.grad(gradient.square().sum(), point)[0])
    assert torch.equal(*second)


def test_a_target_outside_of_the_classes_is_an_error_of_torch() -> None:
    logits, targets = inputs(300, 100, torch.float32)
    targets[250] = 100
    with pytest.raises(IndexError, match="out of bounds"):
        cross_entropy(logits, targets)


def test_transforms_and_other_targets_are_not_divided() -> None:
    logits, targets = inputs(300, 100, torch.float32)
    assert module._can_divide(logits, targets)
    assert not module._can_divide(logits, logits.softmax(-1))
    assert not module._can_divide(logits[:10], targets[:10]), "a single block saves nothing"
    found = []
    torch.func.grad(lambda x: (found.append(module._can_divide(x, targets)), x.sum())[1])(logits)
    assert found == [False]


def test_only_blocks_of_the_logits_are_in_fp32() -> None:
    logits, targets = inputs(4_096, 1_024, torch.bfloat16)
    largest = 0

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            result = operator(*args, **(kwargs or {}))
            each = result[0] if isinstance(result, tuple) else result
            if isinstance(each, torch.Tensor) and each.dtype == torch.float32:
                largest = max(largest, each.numel())
            return result

    with Largest():
        cross_entropy(logits.requires_grad_(), targets).backward()
    assert largest == 4_096, "the losses of the rows, and blocks of four rows"


def test_another_reduction_is_refused() -> None:
    logits, targets = inputs(9, 5, torch.float32)
    with pytest.raises(ConfigError, match="expected reduction 'mean' or 'sum', got 'none'"):
        cross_entropy(logits, targets, reduction="none")


def test_losses_that_are_not_divided_are_those_of_torch() -> None:
    logits, targets = inputs(300, 100, torch.bfloat16)
    by_probabilities = cross_entropy(logits, logits.float().softmax(-1))
    assert torch.equal(by_probabilities, F.cross_entropy(logits.float(), logits.float().softmax(-1)))
    gradient = torch.func.grad(cross_entropy)(logits.float(), targets)
    assert torch.equal(gradient, torch.func.grad(F.cross_entropy)(logits.float(), targets))


def test_logits_that_were_changed_through_numpy_are_an_error_in_the_backward() -> None:
    logits, targets = inputs(300, 100, torch.float32)
    scores = logits.requires_grad_() * 2
    loss = cross_entropy(scores, targets)
    scores.detach().numpy()[130, 7] += 3
    with pytest.raises(RunError, match="changed between the forward and the backward"):
        loss.backward()


def test_losses_that_are_not_finite_have_the_gradients_of_torch() -> None:
    logits, targets = inputs(300, 100, torch.float32)
    logits[5, 3], logits[80, 2] = torch.nan, torch.inf
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    cross_entropy(ours, targets).backward()
    F.cross_entropy(theirs, targets).backward()
    assert torch.allclose(ours.grad, theirs.grad, 0, 0, equal_nan=True)  # type: ignore[arg-type]
