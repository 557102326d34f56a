"""Losses and gradients do not depend on the padding that is cut off."""

import pytest
import torch

from headwater.config.models import MODELS
from headwater.core.batches import IGNORED
from headwater.models.padding import MULTIPLE, sorted_by_length, without_padding
from headwater.models.registry import FAMILIES, build_model, meta_batch

LENGTHS = torch.tensor([3, 17, 9, 12])
SEQ = 32
_ENCODER = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_heads": 2,
    "filter_size": 24,
    "max_position_embeddings": SEQ,
    "dropout_rate": 0.0,
}
_TOWER = {key: value for key, value in _ENCODER.items() if key != "name"}
_PAIRS = {
    "src_vocab_size": 50, "tgt_vocab_size": 50, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_heads": 2,
    "encoder_num_hidden_layers": 2, "decoder_num_hidden_layers": 2, "dropout_rate": 0.0,
    "src_max_position_embeddings": SEQ, "tgt_max_position_embeddings": SEQ,
}  # fmt: skip
MODEL_SECTIONS = {
    "gpt2": _ENCODER,
    "llama": _ENCODER,
    "bloom": _ENCODER,
    "bert": _ENCODER,
    "bert/classifier": _ENCODER | {"num_labels": 3},
    "bert/token_classifier": _ENCODER | {"num_classes": 3},
    "bert/extractive_summarization": _ENCODER,
    "dpr": {"q_encoder": _TOWER, "ctx_encoder": _TOWER},
    "dpo": {"policy_model": _ENCODER | {"name": "gpt2"}, "dpo": {"beta": 0.1}},
    "t5": _PAIRS,
    "transformer": _PAIRS,
}


def _config(name, **changes):
    return MODELS[name].model_validate({"name": name, **MODEL_SECTIONS[name], **changes})


def _filled(name, like):
    """Return values for a tensor of a batch: texts have `LENGTHS` tokens, and padding of zeros."""
    generator = torch.Generator().manual_seed(len(name))
    values = torch.randint(1, 50, like.shape, generator=generator)
    if name in ("masked_lm_positions", "cls_indices"):
        return torch.stack(
            [torch.randint(int(each), like.shape[1:], generator=generator) for each in LENGTHS]
        )
    if name in ("masked_lm_weights", "cls_weights"):
        return torch.ones(like.shape, dtype=torch.int64)
    if like.shape[-1] != SEQ:
        return values % 2 if "label" in name else values
    text = torch.arange(SEQ) < LENGTHS.view(-1, *(1,) * (like.dim() - 1))
    text = text.expand(like.shape)
    if name.endswith("mask"):
        return text.long()
    if name.endswith("token_type_ids"):
        return torch.zeros_like(values)
    if name.startswith(("chosen", "rejected")) and name.endswith("labels"):
        return torch.where(text & (torch.arange(SEQ) > 0), values, IGNORED)
    return torch.where(text, values, 0)


def _batch(config):
    batch = {name: _filled(name, like) for name, like in meta_batch(config, len(LENGTHS), SEQ).items()}
    if config.name == "bert/token_classifier":
        batch["labels"] = batch["labels"] % 3
    return batch


def _computed(model, batch):
    """Return the loss of a batch, and its gradients."""
    model.zero_grad()
    loss = model(batch)
    loss.backward()
    return [loss.detach(), *(each.grad.clone() for each in model.parameters() if each.grad is not None)]


@pytest.mark.parametrize("name", MODEL_SECTIONS)
def test_the_loss_without_padding_is_that_of_the_whole_batch(name):
    config = _config(name)
    texts, model, batch = FAMILIES[name].texts(config), build_model(config).eval(), _batch(config)
    assert texts
    cut = without_padding(sorted_by_length(batch, texts), texts)
    assert cut.keys() == batch.keys()
    for text in texts:
        assert {cut[each].shape[-1] for each in text.names if each in cut} == {3 * MULTIPLE}
    for ours, theirs in zip(_computed(model, cut), _computed(model, batch), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_long_samples_come_first_and_stay_whole():
    texts, batch = FAMILIES["bert"].texts(_config("bert")), _batch(_config("bert"))
    ordered = sorted_by_length(batch, texts)
    order = [1, 3, 2, 0]
    assert all(torch.equal(ordered[name], values[order]) for name, values in batch.items())


def test_a_text_is_never_longer_than_before():
    texts = FAMILIES["gpt2"].texts(_config("gpt2"))
    batch = {name: torch.ones(2, 13, dtype=torch.int64) for name in ("input_ids", "attention_mask", "labels")}
    assert without_padding(batch, texts)["input_ids"].shape == (2, 13)
    batch["attention_mask"].zero_()
    assert without_padding(batch, texts)["input_ids"].shape == (2, MULTIPLE)


def test_packed_texts_keep_their_positions():
    texts = FAMILIES["gpt2"].texts(_config("gpt2"))
    batch = {name: torch.arange(32).view(1, 32) for name in ("input_ids", "position_ids", "attention_span")}
    batch |= {"attention_mask": torch.arange(32).view(1, 32) < 9, "labels": torch.ones(1, 32)}
    cut = without_padding(batch, texts)
    assert {name: each.shape for name, each in cut.items()} == dict.fromkeys(batch, (1, 16))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("bert/qa", {}),
        ("bert/token_classifier", {"include_padding_in_loss": True}),
        ("bert", {"attention_module": "linformer", "extra_attention_params": {"projected_length": 4}}),
        ("mixtral", {"moe": {"num_experts": 2, "top_k": 1, "load_balancing_loss_coef": 0.1}}),
        ("fc_mnist", {}),
    ],
)
def test_models_whose_loss_depends_on_the_padding(name, changes):
    sections = {"bert/qa": _ENCODER, "mixtral": _ENCODER, "fc_mnist": {}, **MODEL_SECTIONS}
    config = MODELS[name].model_validate({"name": name, **sections[name], **changes})
    assert not FAMILIES[name].texts(config)


def _library_model(transformers, kind):
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    more = {"intermediate_size": 24, "max_position_embeddings": SEQ, "pad_token_id": 0, "num_labels": 2}
    if kind == "causal_lm":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **more))
    if kind == "seq2seq":
        config = transformers.T5Config(
            vocab_size=50, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, decoder_start_token_id=0
        )
        return transformers.T5ForConditionalGeneration(config)
    name = "BertForMaskedLM" if kind == "masked_lm" else "BertForSequenceClassification"
    return getattr(transformers, name)(transformers.BertConfig(**sizes, **more))


@pytest.mark.parametrize("kind", ["causal_lm", "masked_lm", "sequence_classification", "seq2seq"])
def test_a_model_of_the_transformers_library(kind, tmp_path):
    transformers = pytest.importorskip("transformers")
    _library_model(transformers, kind).save_pretrained(tmp_path)
    config = MODELS["hf"].model_validate({"name": "hf", "hf": tmp_path, "sequence_length": SEQ})
    assert config.kind == kind
    texts, model, batch = FAMILIES["hf"].texts(config), build_model(config).eval(), _batch(config)
    cut = without_padding(sorted_by_length(batch, texts), texts)
    assert cut["input_ids"].shape[-1] == 3 * MULTIPLE
    assert FAMILIES["hf"].labels(config, cut) == FAMILIES["hf"].labels(config, batch)
    for ours, theirs in zip(_computed(model, cut), _computed(model, batch), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
