"""The loss by Liger Kernel: a stand-in for the package gets the right arguments, and errors have a remedy."""

import sys
import types

import pytest
import torch
from test_loss import problem
from torch.nn import functional as F

import headwater as hw
from headwater.config.models.decoder import DecoderConfig
from headwater.core.errors import ConfigError
from headwater.models import liger
from headwater.models.decoder import Head
from headwater.models.liger import liger_cross_entropy, use_liger
from headwater.models.loss import linear_cross_entropy
from headwater.models.registry import build_model

TINY = {"name": "gpt2", "vocab_size": 32, "hidden_size": 8, "num_hidden_layers": 1, "num_heads": 2,
        "max_position_embeddings": 16, "filter_size": 16}  # fmt: skip


@pytest.fixture
def calls(monkeypatch):
    """Install a stand-in for the package, and take all tensors for tensors on a GPU."""
    made = []

    def fused(input, weight, target, bias=None, ignore_index=-100, reduction="mean", softcap=None):
        made.append(reduction)
        logits = F.linear(input, weight, bias).float()
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        return F.cross_entropy(logits, target, ignore_index=ignore_index, reduction=reduction)

    functional = types.ModuleType("liger_kernel.transformers.functional")
    functional.liger_fused_linear_cross_entropy = fused
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, functional.__name__, functional)
    monkeypatch.setattr(liger.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(liger, "_is_on_gpu", lambda tensor: True)
    return made


def equal_weights(row_weights):
    return (torch.arange(len(row_weights)) % 3 > 0) * 0.125


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("bias", [True, False])
def test_loss_and_gradients_equal_those_in_chunks(bias, softcap, calls):
    *arguments, targets, row_weights = problem(bias=bias)
    row_weights = equal_weights(row_weights)
    targets = targets.masked_fill(row_weights == 0, -7)  # ignored, and outside of the vocabulary
    trained = [each for each in arguments if each is not None]
    found = liger_cross_entropy(*arguments, targets, row_weights, softcap=softcap)
    wanted = linear_cross_entropy(*arguments, targets, row_weights, softcap=softcap)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(torch.autograd.grad(found, trained), torch.autograd.grad(wanted, trained))
    assert calls == ["sum"]


def test_rows_with_different_factors_are_computed_in_chunks(calls):
    arguments = problem()
    assert torch.equal(liger_cross_entropy(*arguments), linear_cross_entropy(*arguments))
    assert calls == []


def test_autocast_computes_in_16_bits(calls):
    *arguments, targets, row_weights = problem()
    with torch.autocast("cpu", torch.bfloat16):
        found = liger_cross_entropy(*arguments, targets, equal_weights(row_weights))
        wanted = linear_cross_entropy(*arguments, targets, equal_weights(row_weights))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-2)


def test_the_dry_run_of_a_plan_is_computed_in_chunks(calls, monkeypatch):
    monkeypatch.setattr(liger, "_is_on_gpu", lambda tensor: tensor.device.type == "cuda")
    *arguments, targets, row_weights = problem()
    liger_cross_entropy(*arguments, targets, equal_weights(row_weights))
    assert calls == []


def tiny():
    return build_model(DecoderConfig(**TINY), device="meta")


def test_heads_use_liger_only_if_it_is_chosen(calls):
    model = tiny()
    (head,) = [module for module in model.modules() if isinstance(module, Head)]
    assert head.cross_entropy is linear_cross_entropy
    use_liger(model, "cuda")
    assert head.cross_entropy is liger_cross_entropy


def test_without_a_gpu_the_remedy_is_the_loss_in_chunks(calls):
    with pytest.raises(ConfigError, match="expected a CUDA device for loss: liger, found cpu") as caught:
        use_liger(tiny(), "cpu")
    assert caught.value.remedy == "use loss: chunked"


def test_without_the_package_the_remedy_is_its_installation(monkeypatch):
    monkeypatch.setattr(liger.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs the package liger-kernel") as caught:
        use_liger(tiny(), "cuda")
    assert "pip install liger-kernel" in caught.value.remedy


def test_a_model_without_a_head_is_refused(calls):
    with pytest.raises(ConfigError, match="Linear has no language-model head"):
        use_liger(torch.nn.Linear(2, 2), "cuda")


def test_a_model_that_computes_its_own_loss_refuses_the_choice():
    with pytest.raises(ConfigError, match="loss: liger is only for models of params files"):
        hw.backend("CPU", loss="liger")
