"""Losses of the transformers library are computed by blocks, with the same bits."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

import headwater
from headwater.models import cross_entropy, library_loss
from headwater.models.library_loss import PostponedLogits, divide_losses

transformers = pytest.importorskip("transformers")

TINY = {"vocab_size": 101, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def llama() -> nn.Module:
    config = transformers.LlamaConfig(**TINY, intermediate_size=48, pad_token_id=0)
    return transformers.LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=101, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def bert() -> nn.Module:
    config = transformers.ModernBertConfig(
        **TINY, intermediate_size=48, pad_token_id=0, sparse_prediction=False
    )
    return transformers.ModernBertForMaskedLM(config)


@pytest.fixture
def divided(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Small blocks; the shapes of the logits whose loss was computed by blocks."""
    monkeypatch.setitem(cross_entropy._BLOCK_BYTES, "cpu", 1 << 12)
    shapes: list[torch.Size] = []
    can_divide = cross_entropy._can_divide

    def noted(logits: torch.Tensor, targets: torch.Tensor) -> bool:
        result = can_divide(logits, targets)
        if result:
            shapes.append(logits.shape)
        return result

    monkeypatch.setattr(cross_entropy, "_can_divide", noted)
    return shapes


def batch() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    tokens = torch.randint(1, 101, (3, 17))
    return {"input_ids": tokens, "labels": tokens.masked_fill(torch.rand(3, 17) < 0.2, -100)}


def trained(model: nn.Module, dtype: torch.dtype, **options: object) -> list[torch.Tensor]:
    torch.manual_seed(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            loss = model(**batch(), **options).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(parameter.detach().clone() for parameter in model.parameters())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [llama, gpt2, bert])
def test_streamed_models_have_the_losses_and_weights_of_plain_pytorch(
    make: Callable[[], nn.Module], dtype: torch.dtype, divided: list[torch.Size]
) -> None:
    torch.manual_seed(0)
    model = make().eval()  # without dropout
    expected = trained(copy.deepcopy(model), dtype)
    assert not divided
    found = trained(headwater.compile(model, headwater.backend("CSX")), dtype)
    assert divided[-1] == (3 * 17, 101)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


def test_the_number_of_items_of_a_batch_divides_the_sum(divided: list[torch.Size]) -> None:
    torch.manual_seed(0)
    model = llama()
    items = torch.tensor(77)
    expected = trained(copy.deepcopy(model), torch.float32, num_items_in_batch=items)
    headwater.compile(model, headwater.backend("CSX"))
    found = trained(model, torch.float32, num_items_in_batch=items)
    assert divided
    assert all(map(torch.equal, found, expected))


def test_a_released_model_has_the_loss_of_the_library_and_can_be_pickled() -> None:
    model = llama()
    library = model.loss_function
    headwater.compile(model, headwater.backend("CSX"))
    assert model.loss_function is not library
    assert copy.deepcopy(model.loss_function).args == (library,)
    headwater.release(model)
    assert model.loss_function is library
    assert b"headwater" not in pickle.dumps(model)


def test_a_loss_of_the_user_is_left_as_it_is() -> None:
    model = llama()
    mine = lambda logits, labels, vocab_size, **_: logits.sum()  # noqa: E731
    model.loss_function = mine
    divide_losses(model)
    assert model.loss_function is mine


def test_losses_over_few_classes_are_not_divided() -> None:
    config = transformers.BertConfig(**TINY, intermediate_size=48)
    model = transformers.BertForSequenceClassification(config)
    divide_losses(model)
    assert "_loss_function" not in vars(model)


def test_a_loss_that_needs_more_of_the_logits_is_left_to_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.loss import loss_utils

    def other(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int) -> torch.Tensor:
        return (logits * 2).sum()

    monkeypatch.setitem(loss_utils.LOSS_MAPPING, "ForCausalLM", other)
    model = llama()
    divide_losses(model)
    assert model.loss_function is other


def test_a_slice_of_logits_has_the_loss_of_the_library(divided: list[torch.Size]) -> None:
    model = llama()
    library = model.loss_function
    divide_losses(model)
    torch.manual_seed(0)
    logits = torch.randn(3, 19, 101, dtype=torch.bfloat16)[:, 2:]
    labels = torch.randint(0, 101, (3, 17))
    assert torch.equal(model.loss_function(logits, labels, 101), library(logits, labels, 101))
    assert divided == [(3 * 17, 101)]


def test_models_compiled_under_a_fake_mode_are_divided() -> None:
    model = llama()
    library_loss._is_understood.cache_clear()
    with torch._subclasses.FakeTensorMode():
        divide_losses(model)
    assert "_loss_function" in vars(model)


def test_other_operators_get_all_logits() -> None:
    logits = torch.randn(2, 3, dtype=torch.bfloat16)
    postponed = PostponedLogits(logits).float()
    assert torch.equal(torch.logsumexp(postponed, -1), torch.logsumexp(logits.float(), -1))  # type: ignore[call-overload]
    smoothed = nn.functional.cross_entropy(postponed, torch.tensor([0, 2]), label_smoothing=0.1)  # type: ignore[arg-type]
    expected = nn.functional.cross_entropy(logits.float(), torch.tensor([0, 2]), label_smoothing=0.1)
    assert torch.equal(smoothed, expected)
