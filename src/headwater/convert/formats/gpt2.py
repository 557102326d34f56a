"""GPT-2 and GPT-3 style models in the format of `GPT2LMHeadModel`; keys and rules for related formats."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from headwater.config.models.decoder import DecoderConfig
from headwater.convert.formats.base import Format, Key, decoder_meaning, function, their_function
from headwater.convert.rules import Rule, both, linear_transposed, repeated, same, scaled, transposed

GPT2_KEYS = {
    "vocab_size": Key("vocab_size", 50257),
    "hidden_size": Key("n_embd", 768),
    "max_position_embeddings": Key("n_positions", 1024),
    "num_hidden_layers": Key("n_layer", 12),
    "num_heads": Key("n_head", 12),
    "filter_size": Key("n_inner", None, "ffn_size"),
    "dropout_rate": Key("resid_pdrop", 0.1, "residual_dropout"),
    "embedding_dropout_rate": Key("embd_pdrop", 0.1, "embedding_dropout"),
    "attention_dropout_rate": Key("attn_pdrop", 0.1, "attention_dropout"),
    "layer_norm_epsilon": Key("layer_norm_epsilon", 1e-5),
    "share_embedding_weights": Key("tie_word_embeddings", True),
}
"""Keys of GPT-2 and of the formats derived from it."""

SCALE_BY_LAYER = {"scale_qk_dot_by_layer_idx": Key("scale_attn_by_inverse_layer_idx", False)}
"""Key that only some of the formats derived from GPT-2 have: scores are divided by the layer's number."""

GPT2_BUFFERS = (".attn.bias", ".attn.masked_bias")
"""Suffixes of tensors that hold no weights."""

QKV = ("blocks.{}.attention.qkv", "transformer.h.{}.attn.c_attn")
"""Name of the projection of queries, keys and values: in our model, and in GPT-2."""


def gpt2_rules(
    qkv: Iterable[Rule], linear: Callable[[str, str], Iterable[Rule]] = linear_transposed
) -> tuple[Rule, ...]:
    """Return the rules for a decoder whose tensors have the names of GPT-2.

    Args:
        qkv: rules of the projection of queries, keys and values.
        linear: makes the rules of every other linear layer from our name and their name.
    """
    there = "transformer.h.{}"
    return (
        same("embedding.weight", "transformer.wte.weight"),
        same("position_embedding.weight", "transformer.wpe.weight"),
        *both(same, "blocks.{}.attention_norm", f"{there}.ln_1"),
        *qkv,
        *linear("blocks.{}.attention.output", f"{there}.attn.c_proj"),
        *both(same, "blocks.{}.ffn_norm", f"{there}.ln_2"),
        *linear("blocks.{}.ffn.input", f"{there}.mlp.c_fc"),
        *linear("blocks.{}.ffn.output", f"{there}.mlp.c_proj"),
        *both(same, "norm", "transformer.ln_f"),
        same("head.weight", "lm_head.weight"),
    )


def scores(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of the model section for the scaling of attention scores."""
    return {"attention_type": "scaled_dot_product" if hf.get("scale_attn_weights", True) else "dot_product"}


def their_scores(config: DecoderConfig) -> dict[str, Any]:
    """Return the keys of `config.json` for the scaling of attention scores."""
    return {"scale_attn_weights": config.attention_type == "scaled_dot_product"}


_ABSORBED = ("embeddings_scale", "output_logits_scale", "attention_type", "share_embedding_weights")
"""Keys of a model section whose factors `GPT2_MUP` multiplies into the weights."""


GPT2 = Format(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    models=("gpt2", "gpt3"),
    keys=GPT2_KEYS | SCALE_BY_LAYER,
    section=lambda hf: {
        **scores(hf),
        "nonlinearity": function(hf, "activation_function", "gelu_new"),
    },
    config=lambda config: {
        **their_scores(config),
        "activation_function": their_function(config.nonlinearity),
    },
    refused={"add_cross_attention": False},
    rules=lambda config: gpt2_rules(linear_transposed(*QKV)),
    elsewhere=dict.fromkeys(_ABSORBED, "gpt2-mup"),
    ignored=GPT2_BUFFERS,
)


def has_scales(config: DecoderConfig) -> bool:
    """True if a decoder multiplies embeddings, logits or scores by factors that GPT-2 does not have."""
    usual = 1.0 if config.attention_type == "dot_product" else config.head_size**-0.5
    first = config.attention_scale(0)
    return not (config.embeddings_scale == 1.0 and config.logits_scale == 1.0 and math.isclose(first, usual))


def _absorbing_rules(config: DecoderConfig) -> tuple[Rule, ...]:
    """Return the rules of GPT-2 with muP's factors multiplied into embeddings, queries and head."""
    if not has_scales(config):
        return gpt2_rules(linear_transposed(*QKV))
    by_embedding, by_head = config.embeddings_scale, config.logits_scale
    by_query = config.attention_scale(0) * math.sqrt(config.head_size)
    rows = torch.ones(config.inner_size + 2 * config.num_kv_heads * config.head_size, 1)
    # Only the queries are scaled. If the keys were scaled too, scores would get the factor twice.
    rows[: config.inner_size] = by_query
    embedding, head = "transformer.wte.weight", "lm_head.weight"
    qkv = (
        scaled(transposed(*(f"{name}.weight" for name in QKV)), rows),
        scaled(same(*(f"{name}.bias" for name in QKV)), rows[:, 0]),
    )
    changed = {
        "embedding.weight": scaled(repeated("embedding.weight", [embedding, head]), by_embedding, by_head)
        if config.share_embedding_weights
        else scaled(same("embedding.weight", embedding), by_embedding),
        # Our model scales the sum of both embeddings.
        "position_embedding.weight": scaled(
            same("position_embedding.weight", "transformer.wpe.weight"), by_embedding
        ),
        "head.weight": scaled(same("head.weight", head), by_head),
    }
    return tuple(changed.get(rule.ours, rule) for rule in gpt2_rules(qkv))


GPT2_MUP = dataclasses.replace(
    GPT2,
    elsewhere={},
    rules=_absorbing_rules,
    config=lambda config: {
        "scale_attn_weights": True,
        "activation_function": their_function(config.nonlinearity),
        # Embedding and head get different factors, so that the format needs two matrices.
        "tie_word_embeddings": config.share_embedding_weights and not has_scales(config),
    },
    meaning=lambda config: {
        key: value for key, value in decoder_meaning(config).items() if key not in _ABSORBED
    },
)
"""GPT-2 with muP. An export multiplies muP's factors into the weights, because `GPT2LMHeadModel` has no such
factors. An import is therefore a model without them."""
