"""Normalization layers by their kind, compared with torch's."""

import pytest
import torch
from torch.nn import functional as F

from headwater.models.layers.norm import LayerNorm, RMSNorm, make_norm


@pytest.mark.parametrize("kind", ["layernorm", "biasless-layernorm", "rmsnorm"])
def test_each_kind_equals_torch(kind):
    norm = make_norm(kind, 8, 1e-3)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.normal_()
    x = torch.randn(2, 3, 8)
    assert isinstance(norm, RMSNorm if kind == "rmsnorm" else LayerNorm)
    if kind == "rmsnorm":
        assert torch.equal(norm(x), F.rms_norm(x, (8,), norm.weight, 1e-3))
    else:
        assert (norm.bias is None) == (kind == "biasless-layernorm")
        assert torch.equal(norm(x), F.layer_norm(x, (8,), norm.weight, norm.bias, 1e-3))


def test_unit_offset_adds_one_to_the_factor():
    norm = make_norm("rmsnorm", 4, 1e-6, unit_offset=True)
    torch.nn.init.zeros_(norm.weight)
    x = torch.randn(2, 4)
    torch.testing.assert_close(norm(x), F.rms_norm(x, (4,), None, 1e-6))


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_output_has_the_dtype_of_the_input(kind):
    norm = make_norm(kind, 4, 1e-6)
    for parameter in norm.parameters():
        torch.nn.init.ones_(parameter)
    assert norm(torch.randn(2, 4).bfloat16()).dtype == torch.bfloat16
