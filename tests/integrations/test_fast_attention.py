"""Headwater's attention in models of the transformers library."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import headwater
from headwater.core import attention
from headwater.core.attention import attention_kernel_available
from headwater.core.errors import ConfigError

transformers = pytest.importorskip("transformers")

from headwater.integrations.attention import use_fast_attention  # noqa: E402 it needs transformers

TINY = {"vocab_size": 101, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def llama(**options: object) -> nn.Module:
    """Return a Llama whose heads share keys in pairs."""
    config = transformers.LlamaConfig(
        **TINY, num_key_value_heads=2, intermediate_size=48, pad_token_id=0, **options
    )
    return transformers.LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    options = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=101, n_embd=64, n_layer=2, n_head=4, **options)
    )


def modern_bert() -> nn.Module:
    """Return an encoder, whose attention is not causal."""
    return transformers.ModernBertForMaskedLM(
        transformers.ModernBertConfig(**TINY, intermediate_size=48, pad_token_id=0, attention_dropout=0.0)
    )


@pytest.fixture
def kernel_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The functions of the kernel that were called."""
    calls: list[str] = []
    call = attention._call

    def noted(name: str, *args: object) -> None:
        calls.append(name)
        call(name, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(attention, "_call", noted)
    return calls


def gradients(model: nn.Module, *, autocast: bool = True, **others: Tensor) -> list[Tensor]:
    torch.manual_seed(1)
    tokens = torch.randint(1, 101, (2, 40))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(input_ids=tokens, labels=tokens, **others).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def check_errors(exact: list[Tensor], usual: list[Tensor], found: list[Tensor]) -> None:
    """Check that errors are at most 1.5 times those of torch's attention, or a quarter of a unit of bf16."""
    for reference, theirs, ours in zip(exact, usual, found, strict=True):
        allowed = 1.5 * (theirs - reference).norm() + 1e-3 * reference.norm()
        assert (ours - reference).norm() <= allowed


@pytest.mark.parametrize("make", [llama, gpt2, modern_bert])
def test_gradients_are_as_near_to_those_in_fp32_as_with_the_attention_of_torch(
    make: Callable[[], nn.Module], kernel_calls: list[str]
) -> None:
    torch.manual_seed(0)
    model = make()
    exact = gradients(copy.deepcopy(model), autocast=False)
    usual = gradients(copy.deepcopy(model))
    assert not kernel_calls
    use_fast_attention(model)
    found = gradients(model)
    assert bool(kernel_calls) == attention_kernel_available()
    check_errors(exact, usual, found)


def test_a_streamed_model_has_the_gradients_of_the_same_model_in_plain_pytorch(
    kernel_calls: list[str],
) -> None:
    torch.manual_seed(0)
    model = llama()
    use_fast_attention(model)
    expected = gradients(copy.deepcopy(model))
    headwater.compile(model, headwater.backend("CSX"))
    kernel_calls.clear()
    assert all(map(torch.equal, gradients(model), expected))
    assert bool(kernel_calls) == attention_kernel_available()


@pytest.mark.parametrize("make", [llama, gpt2, modern_bert])
def test_the_kernel_computes_attention_with_padding_after_the_text(
    make: Callable[[], nn.Module], kernel_calls: list[str]
) -> None:
    torch.manual_seed(0)
    model = make()
    padded = torch.ones(2, 40, dtype=torch.long)
    padded[0, 31:] = 0
    exact = gradients(copy.deepcopy(model), autocast=False, attention_mask=padded)
    usual = gradients(copy.deepcopy(model), attention_mask=padded)
    use_fast_attention(model)
    found = gradients(model, attention_mask=padded)
    assert bool(kernel_calls) == attention_kernel_available()
    check_errors(exact, usual, found)
    kernel_calls.clear()
    headwater.compile(model, headwater.backend("CSX"))
    model.zero_grad()
    assert all(map(torch.equal, gradients(model, attention_mask=padded), found))
    assert bool(kernel_calls) == attention_kernel_available()


def test_attention_with_padding_before_the_text_or_dropout_is_that_of_torch(kernel_calls: list[str]) -> None:
    padded = torch.ones(2, 40, dtype=torch.long)
    padded[0, :9] = 0
    for model, others in ((llama(), {"attention_mask": padded}), (llama(attention_dropout=0.1), {})):
        expected = gradients(copy.deepcopy(model), **others)
        use_fast_attention(model)
        assert all(map(torch.equal, gradients(model, **others), expected))
    assert not kernel_calls


def test_in_fp32_the_results_are_those_of_torch() -> None:
    model = gpt2()
    expected = gradients(copy.deepcopy(model), autocast=False)
    use_fast_attention(model)
    assert all(map(torch.equal, gradients(model, autocast=False), expected))


def test_a_module_that_is_not_of_transformers_is_refused() -> None:
    with pytest.raises(ConfigError, match="got Linear, which contains none"):
        use_fast_attention(nn.Linear(2, 2))


def test_a_model_whose_attention_cannot_be_replaced_is_refused_and_left_as_it_is() -> None:
    config = transformers.Gemma2Config(**TINY, num_key_value_heads=2, head_dim=16, intermediate_size=48)
    model = transformers.Gemma2ForCausalLM(config)
    before = model.config._attn_implementation
    with pytest.raises(ConfigError, match="cannot replace the attention of Gemma2ForCausalLM"):
        use_fast_attention(model)
    assert model.config._attn_implementation == before
