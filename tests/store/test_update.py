"""The update of a step: its options, and the factor of its gradients."""

import pytest
import torch

from headwater.store.update import Part, Update


def test_the_options_of_a_name_override_those_of_the_step():
    update = Update(1, {"lr": 1.0, "eps": 2.0}, by_name=lambda name: {"lr": 3.0} if name == "w" else {})
    assert update.options_of("w") == {"lr": 3.0, "eps": 2.0}
    assert update.options_of("v") == {"lr": 1.0, "eps": 2.0}


def test_the_factor_clips_as_torch_does():
    gradient = torch.randn(50)
    weight = torch.nn.Parameter(torch.zeros(50))
    weight.grad = gradient.clone()
    norm = torch.nn.utils.clip_grad_norm_([weight], 0.5)
    factor = Update(1, {}, max_norm=0.5).factor(norm)
    given = gradient.clone()
    found = Part(1, Update(1, {}), factor).prepared(given, torch.float32, torch.empty(50))
    assert torch.equal(found, weight.grad)
    assert torch.equal(given, gradient), "an update that is repeated starts from the same gradient"


def test_a_step_without_clipping_and_scaling_has_no_factor():
    assert Update(1, {}).factor(torch.tensor(3.0)) is None
    assert Update(1, {}, loss_scale=4.0).factor(torch.tensor(3.0)).item() == 0.25


@pytest.mark.parametrize("sparse", [False, True])
def test_a_gradient_of_another_dtype_is_scaled_and_clipped_in_the_masters_dtype(sparse):
    gradient = torch.tensor([[8.0], [0.0], [-1.0]], dtype=torch.bfloat16)
    part = Part(1, Update(1, {}, max_value=1.0), torch.tensor(0.5))
    given = gradient.to_sparse(1) if sparse else gradient
    found = part.prepared(given, torch.float32, torch.empty(3, 1))
    dense = found.to_dense() if sparse else found
    assert dense.dtype == torch.float32
    assert torch.equal(dense, torch.tensor([[1.0], [0.0], [-0.5]]))
