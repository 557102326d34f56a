"""Gradient norms equal those of torch."""

import pytest
import torch

from headwater.store.gradients.norms import gradient_norm
from headwater.store.layout import PIECE_ELEMENTS


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_narrow_gradient_of_several_pieces_is_measured_in_fp32(dtype):
    gradient = torch.full((PIECE_ELEMENTS + 5,), 300.0, dtype=dtype)  # the square is infinite in fp16
    found = gradient_norm(gradient)
    expected = gradient.double().norm().item()
    assert found.dtype == torch.float32 and found.item() == pytest.approx(expected, rel=0.01)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning")
def test_entries_of_a_sparse_gradient_for_the_same_row_are_added_first():
    indices, values = torch.tensor([[1, 1]]), torch.tensor([[1.0], [2.0]])
    sparse = torch.sparse_coo_tensor(indices, values, (3, 1), check_invariants=True)
    assert gradient_norm(sparse).item() == 3.0
