"""Norms and feed-forward layers compared with transformers."""

import pytest
import torch

from headwater.models.layers.feed_forward import GATED, NONLINEARITIES, FeedForward
from headwater.models.layers.norm import RMSNorm

HF_NAMES = {
    "gelu": "gelu",
    "gelu_new": "gelu_new",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "squared_relu": "relu2",
    "silu": "silu",
    "tanh": "tanh",
    "swiglu": "silu",
    "geglu": "gelu",
    "geglu_new": "gelu_pytorch_tanh",
    "reglu": "relu",
}


@pytest.fixture
def x():
    torch.manual_seed(0)
    return torch.randn(2, 5, 8)


def filled(module):
    for param in module.parameters():
        torch.nn.init.normal_(param, std=0.3)
    return module


@pytest.mark.parametrize("name", NONLINEARITIES)
def test_nonlinearities_equal_transformers(name, x):
    activations = pytest.importorskip("transformers.activations")
    torch.testing.assert_close(NONLINEARITIES[name](x), activations.ACT2FN[HF_NAMES[name]](x))


@pytest.mark.parametrize("name", sorted(GATED))
def test_gated_feed_forward_equals_llama(name, x):
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaMLP

    sizes = {"hidden_size": 8, "intermediate_size": 24, "num_attention_heads": 1}
    theirs = filled(LlamaMLP(transformers.LlamaConfig(**sizes, hidden_act=HF_NAMES[name])))
    ours = FeedForward(8, 24, name, bias=False, dropout=0.0)
    ours.load_state_dict(
        {
            "gate.weight": theirs.gate_proj.weight,
            "input.weight": theirs.up_proj.weight,
            "output.weight": theirs.down_proj.weight,
        }
    )
    assert torch.equal(ours(x), theirs(x))


def test_ungated_feed_forward_has_no_gate():
    assert {name for name, _ in FeedForward(8, 24, "gelu", bias=True, dropout=0.0).named_parameters()} == {
        "input.weight",
        "input.bias",
        "output.weight",
        "output.bias",
    }


@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_norms_equal_llama_and_gemma(unit_offset, dtype, x):
    pytest.importorskip("transformers")
    from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    theirs = filled((Gemma2RMSNorm if unit_offset else LlamaRMSNorm)(8, eps=1e-3))
    ours = RMSNorm(8, 1e-3, unit_offset=unit_offset)
    ours.load_state_dict(theirs.state_dict())
    x = (10 * x).to(dtype)
    output = ours(x)
    assert output.dtype == dtype
    expected = (theirs(x.float()) if dtype == torch.bfloat16 else theirs(x)).to(dtype)
    torch.testing.assert_close(output, expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)
