"""BERT and its fine-tuned variants, RoBERTa, ESM-2, and the two encoders of DPR."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headwater.config.models.encoder import (
    BertConfig,
    ClassifierConfig,
    DPRConfig,
    EncoderSection,
    ExtractiveSummarizationConfig,
    QuestionAnsweringConfig,
    TokenClassifierConfig,
    TowerConfig,
)
from headwater.convert.formats.base import Format, Key, function, headless, their_function
from headwater.convert.rules import Rule, both, repeated, same, stacked
from headwater.core.errors import ConfigError

_KEYS = {
    "vocab_size": Key("vocab_size", 30522),
    "hidden_size": Key("hidden_size", 768),
    "num_hidden_layers": Key("num_hidden_layers", 12),
    "num_heads": Key("num_attention_heads", 12),
    "filter_size": Key("intermediate_size", 3072),
    "num_segments": Key("type_vocab_size", 2),
    "dropout_rate": Key("hidden_dropout_prob", 0.1),
    "attention_dropout_rate": Key("attention_probs_dropout_prob", 0.1, "attention_dropout"),
    "layer_norm_epsilon": Key("layer_norm_eps", 1e-12),
}
_BERT_KEYS = {**_KEYS, "max_position_embeddings": Key("max_position_embeddings", 512)}
_ENCODERS_ONLY = {"is_decoder": False, "add_cross_attention": False}


def _task_dropout(hf: Mapping[str, Any]) -> float:
    """Return the dropout before the classifier: that of hidden states, unless the config sets another one."""
    own = hf.get("classifier_dropout")
    return float(hf.get("hidden_dropout_prob", 0.1) if own is None else own)


def _encoder_rules(
    config: EncoderSection, base: str, *, ours: str = "encoder", pre_norm: bool = False
) -> tuple[Rule, ...]:
    layer, embeddings = f"{base}.encoder.layer.{{}}", f"{base}.embeddings"
    norms = (
        ("attention.LayerNorm", "LayerNorm")
        if pre_norm
        else ("attention.output.LayerNorm", "output.LayerNorm")
    )
    return (
        same(f"{ours}.embedding.weight", f"{embeddings}.word_embeddings.weight"),
        same(f"{ours}.position_embedding.weight", f"{embeddings}.position_embeddings.weight"),
        same(f"{ours}.segment_embedding.weight", f"{embeddings}.token_type_embeddings.weight"),
        *both(same, f"{ours}.embedding_norm", f"{embeddings}.LayerNorm"),
        *both(
            stacked,
            f"{ours}.blocks.{{}}.attention.qkv",
            [f"{layer}.attention.self.{name}" for name in ("query", "key", "value")],
            (config.hidden_size,) * 3,
        ),
        *both(same, f"{ours}.blocks.{{}}.attention.output", f"{layer}.attention.output.dense"),
        *both(same, f"{ours}.blocks.{{}}.attention_norm", f"{layer}.{norms[0]}"),
        *both(same, f"{ours}.blocks.{{}}.ffn.input", f"{layer}.intermediate.dense"),
        *both(same, f"{ours}.blocks.{{}}.ffn.output", f"{layer}.output.dense"),
        *both(same, f"{ours}.blocks.{{}}.ffn_norm", f"{layer}.{norms[1]}"),
        *both(same, f"{ours}.norm", f"{base}.encoder.emb_layer_norm_after"),
        *both(same, "pooler.dense", f"{base}.pooler.dense"),
    )


def _function(hf: Mapping[str, Any]) -> dict[str, Any]:
    return {"encoder_nonlinearity": function(hf, "hidden_act", "gelu")}


def _their_function(config: Any) -> dict[str, Any]:
    return {"hidden_act": their_function(config.encoder_nonlinearity)}


def _meaning(config: EncoderSection) -> dict[str, Any]:
    """Return the settings that decide the function of an encoder and the names of its weights."""
    keys = (
        "vocab_size", "hidden_size", "num_hidden_layers", "num_heads", "filter_size", "encoder_nonlinearity",
        "position_embedding_type", "mask_padding_in_positional_embed", "max_position_embeddings",
        "num_segments", "embedding_layer_norm", "layer_norm_epsilon", "norm_first", "use_final_layer_norm",
        "token_dropout", "attention_scale", "embeddings_scale", "attention_module",
    )  # fmt: skip
    more = (
        "disable_nsp", "share_embedding_weights", "logits_scale", "pooler_nonlinearity", "num_labels",
        "num_classes",
    )  # fmt: skip
    meaning = {key: getattr(config, key) for key in (*keys, *more) if hasattr(config, key)}
    if isinstance(config, BertConfig):
        meaning["mlm_nonlinearity"] = config.mlm_nonlinearity or config.encoder_nonlinearity
    if config.position_embedding_type == "rotary":
        meaning |= {"rotary_dim": config.rotary_size, "rope_theta": config.rope_theta}
    return meaning


BERT = Format(
    model_type="bert",
    architecture="BertForPreTraining",
    models=("bert",),
    schema=BertConfig,
    meaning=_meaning,
    keys=_BERT_KEYS,
    section=_function,
    config=_their_function,
    refused=_ENCODERS_ONLY,
    rules=lambda config: (
        *_encoder_rules(config, "bert"),
        *both(same, "mlm.dense", "cls.predictions.transform.dense"),
        *both(same, "mlm.norm", "cls.predictions.transform.LayerNorm"),
        same("mlm.output.weight", "cls.predictions.decoder.weight"),
        same("mlm.output.bias", "cls.predictions.bias"),
        *both(same, "nsp", "cls.seq_relationship"),
    ),
    prefix="bert.",
    others=("cls.",),
    head="cls.predictions.decoder",
    # The bias is a second copy of `cls.predictions.bias`.
    ignored=("embeddings.position_ids", "cls.predictions.decoder.bias"),
)


def _labels(config: Any) -> dict[str, Any]:
    count = getattr(config, "num_labels", None) or config.num_classes
    return {
        **_their_function(config),
        "id2label": {str(number): f"LABEL_{number}" for number in range(count)},
        "label2id": {f"LABEL_{number}": number for number in range(count)},
    }


def _num_labels(hf: Mapping[str, Any]) -> int:
    return len(hf.get("id2label") or (0, 1))


def _head_on_bert(architecture: str, model: str, head: str, **differing: Any) -> Format:
    """Return the format of BERT with one matrix as its head.

    Args:
        architecture: name of the class.
        model: name of our model.
        head: their name of the matrix.
        differing: fields in which the format differs from that of a head without settings.
    """
    usual: dict[str, Any] = {
        "keys": _BERT_KEYS,
        "section": _function,
        "config": _their_function,
        "others": (f"{head}.",),
    }
    return Format(
        model_type="bert",
        architecture=architecture,
        models=(model,),
        meaning=_meaning,
        refused=_ENCODERS_ONLY,
        rules=lambda config: (*_encoder_rules(config, "bert"), *both(same, "output", head)),
        prefix="bert.",
        head=head,
        ignored=("embeddings.position_ids",),
        **(usual | differing),
    )


BERT_CLASSIFIER = _head_on_bert(
    "BertForSequenceClassification",
    "bert/classifier",
    "classifier",
    schema=ClassifierConfig,
    keys={**_BERT_KEYS, "task_dropout": Key("classifier_dropout", None)},
    section=lambda hf: {
        **_function(hf),
        "num_labels": _num_labels(hf),
        "task_dropout": _task_dropout(hf),
        "problem_type": hf.get("problem_type") or "single_label_classification",
    },
    config=lambda config: _labels(config) | {"problem_type": config.problem_type},
)

BERT_TOKEN_CLASSIFIER = _head_on_bert(
    "BertForTokenClassification",
    "bert/token_classifier",
    "classifier",
    schema=TokenClassifierConfig,
    keys={**_BERT_KEYS, "encoder_output_dropout_rate": Key("classifier_dropout", None, "output_dropout")},
    section=lambda hf: {
        **_function(hf),
        "num_classes": _num_labels(hf),
        "encoder_output_dropout_rate": hf.get("classifier_dropout"),
    },
    config=_labels,
)

BERT_QA = _head_on_bert("BertForQuestionAnswering", "bert/qa", "qa_outputs", schema=QuestionAnsweringConfig)

BERT_SUMMARIZATION = headless(
    _head_on_bert(
        "BertModel",
        "bert/extractive_summarization",
        "classifier",
        schema=ExtractiveSummarizationConfig,
        others=(),
    )
)
"""Format of extractive summarization: the encoder alone, as transformers has no class with this head."""


def _token_head(config: BertConfig) -> tuple[Rule, ...]:
    bias = same("mlm.output.bias", "lm_head.bias")
    if not config.share_embedding_weights:  # there are two copies then; the decoder's counts
        bias = repeated("mlm.output.bias", ["lm_head.decoder.bias", "lm_head.bias"])
    return (
        *both(same, "mlm.dense", "lm_head.dense"),
        *both(same, "mlm.norm", "lm_head.layer_norm"),
        same("mlm.output.weight", "lm_head.decoder.weight"),
        bias,
    )


def _roberta_section(hf: Mapping[str, Any]) -> dict[str, Any]:
    pad = hf.get("pad_token_id", 1)
    return {
        **_function(hf),
        "disable_nsp": True,
        "mask_padding_in_positional_embed": True,
        "pad_token_id": pad,
        "mlm_nonlinearity": "gelu",
        "max_position_embeddings": hf.get("max_position_embeddings", 512) - pad - 1,
    }


def _roberta_config(config: BertConfig) -> dict[str, Any]:
    return {
        **_their_function(config),
        "pad_token_id": config.pad_token_id,
        "max_position_embeddings": config.max_position_embeddings + config.pad_token_id + 1,
    }


ROBERTA = Format(
    model_type="roberta",
    architecture="RobertaForMaskedLM",
    models=("bert",),
    schema=BertConfig,
    meaning=_meaning,
    keys={**_KEYS, "share_embedding_weights": Key("tie_word_embeddings", True)},
    section=_roberta_section,
    config=_roberta_config,
    refused=_ENCODERS_ONLY,
    rules=lambda config: (*_encoder_rules(config, "roberta"), *_token_head(config)),
    prefix="roberta.",
    others=("lm_head.",),
    head="lm_head.decoder",
    ignored=("embeddings.position_ids", "lm_head.decoder.bias"),
)

ESM = Format(
    model_type="esm",
    architecture="EsmForMaskedLM",
    models=("esm2",),
    schema=BertConfig,
    meaning=_meaning,
    keys={
        **{key: value for key, value in _KEYS.items() if key != "num_segments"},
        "max_position_embeddings": Key("max_position_embeddings", 1026),
        "pad_token_id": Key("pad_token_id", None),
        "mask_token_id": Key("mask_token_id", None),
        "token_dropout": Key("token_dropout", False),
        "share_embedding_weights": Key("tie_word_embeddings", True),
    },
    section=lambda hf: {"position_embedding_type": "rotary", "num_segments": 0},
    config=lambda config: {"position_embedding_type": "rotary", "emb_layer_norm_before": False},
    refused={**_ENCODERS_ONLY, "position_embedding_type": "rotary", "emb_layer_norm_before": False},
    rules=lambda config: (*_encoder_rules(config, "esm", pre_norm=True), *_token_head(config)),
    prefix="esm.",
    others=("lm_head.",),
    head="lm_head.decoder",
    ignored=(
        "embeddings.position_ids", "lm_head.decoder.bias", ".rotary_embeddings.inv_freq",
        "contact_head.regression.weight", "contact_head.regression.bias",
    ),
)  # fmt: skip


def _tower(architecture: str) -> Format:
    """Return the format of one of DPR's encoders, which converts its `config.json` but no tensors."""
    return Format(
        model_type="dpr",
        architecture=architecture,
        models=(),
        schema=TowerConfig,
        meaning=_meaning,
        keys=_BERT_KEYS,
        section=_function,
        config=_their_function,
        refused={**_ENCODERS_ONLY, "projection_dim": 0},
        rules=lambda config: (),
    )


_TOWERS = {
    "question_encoder": ("q_encoder", "questions", _tower("DPRQuestionEncoder")),
    "ctx_encoder": ("ctx_encoder", "contexts", _tower("DPRContextEncoder")),
}
"""The encoders of DPR, by the library's names: key of the model section, our module, format of the config."""


def _towers_from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
    if not hf.keys() >= _TOWERS.keys():
        raise ConfigError(
            "expected the configs of two encoders, got one",
            where="config.json",
            remedy=f"put both encoders into one folder, as {' and '.join(_TOWERS)}, and name that folder",
        )
    return {
        ours: format.config_from_hf(hf[theirs], where=f"{theirs}/config.json")
        for theirs, (ours, _, format) in _TOWERS.items()
    }


DPR = Format(
    model_type="dpr",
    architecture="DPRQuestionEncoder and DPRContextEncoder",
    models=("dpr",),
    schema=DPRConfig,
    meaning=lambda config: {
        f"{ours}.{key}": value
        for ours, _, _ in _TOWERS.values()
        for key, value in _meaning(getattr(config, ours)).items()
    },
    keys={},
    section=_towers_from_hf,
    config=lambda config: {
        theirs: format.config_to_hf(getattr(config, ours)) for theirs, (ours, _, format) in _TOWERS.items()
    },
    rules=lambda config: [
        rule
        for theirs, (ours, module, _) in _TOWERS.items()
        for rule in _encoder_rules(getattr(config, ours), f"{theirs}.bert_model", ours=module)
    ],
    prefix="question_encoder.",
    others=("ctx_encoder.",),
    ignored=("embeddings.position_ids", ".pooler.dense.weight", ".pooler.dense.bias"),
    folders=tuple(_TOWERS),
)
