"""SantaCoder and StarCoder in the format of `GPTBigCodeForCausalLM`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headwater.config.models import DecoderConfig
from headwater.convert.formats.base import Format, Key, function, grouped, interleaved_heads, their_function
from headwater.convert.rules import Rule, both, permuted, same


def _section(hf: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **grouped(1 if hf.get("multi_query", True) else None, hf["n_head"]),
        "nonlinearity": function(hf, "activation_function", "gelu_pytorch_tanh"),
        "attention_type": "scaled_dot_product" if hf.get("scale_attn_weights", True) else "dot_product",
    }


def _config(config: DecoderConfig) -> dict[str, Any]:
    return {
        "multi_query": config.num_kv_heads == 1,
        "activation_function": their_function(config.nonlinearity),
        "scale_attn_weights": config.attention_type == "scaled_dot_product",
    }


def _rules(config: DecoderConfig) -> tuple[Rule, ...]:
    there = "transformer.h.{}"
    heads = interleaved_heads(config)
    return (
        same("embedding.weight", "transformer.wte.weight"),
        same("position_embedding.weight", "transformer.wpe.weight"),
        *both(same, "blocks.{}.attention_norm", f"{there}.ln_1"),
        *both(permuted, "blocks.{}.attention.qkv", f"{there}.attn.c_attn", heads),
        *both(same, "blocks.{}.attention.output", f"{there}.attn.c_proj"),
        *both(same, "blocks.{}.ffn_norm", f"{there}.ln_2"),
        *both(same, "blocks.{}.ffn.input", f"{there}.mlp.c_fc"),
        *both(same, "blocks.{}.ffn.output", f"{there}.mlp.c_proj"),
        *both(same, "norm", "transformer.ln_f"),
        same("head.weight", "lm_head.weight"),
    )


GPT_BIGCODE = Format(
    model_type="gpt_bigcode",
    architecture="GPTBigCodeForCausalLM",
    models=("starcoder", "santacoder"),
    keys={
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
    },
    section=_section,
    config=_config,
    rules=_rules,
    ignored=(".attn.bias", ".attn.masked_bias"),
)
