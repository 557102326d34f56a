"""Falcon, with one norm per block (7B) or two (40B, 180B)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headwater.config.models.decoder import DecoderConfig
from headwater.convert.formats.base import (
    Format,
    Key,
    function,
    grouped,
    interleaved_heads,
    rope_parameters,
    rotary,
    their_function,
)
from headwater.convert.rules import Rule, both, permuted, same


def _section(hf: Mapping[str, Any]) -> dict[str, Any]:
    heads, new = hf["num_attention_heads"], hf.get("new_decoder_architecture", False)
    kv_heads = hf.get("num_kv_heads") or heads
    if not new:
        kv_heads = 1 if hf.get("multi_query", True) else heads
    norms = hf.get("num_ln_in_parallel_attn") or (2 if new else 1)
    bias = hf.get("bias", False)
    return {
        **rotary(hf),
        **grouped(kv_heads, heads),
        "parallel_blocks": new or hf.get("parallel_attn", True),
        "use_untied_layer_norm": new and norms == 2,
        "filter_size": hf.get("ffn_hidden_size") or 4 * hf["hidden_size"],
        "nonlinearity": function(hf, "activation", "gelu"),
        "use_projection_bias_in_attention": bias,
        "use_ffn_bias_in_attention": bias,
        "use_ffn_bias": bias,
    }


def _config(config: DecoderConfig) -> dict[str, Any]:
    new = config.use_untied_layer_norm or config.num_kv_heads not in (1, config.num_heads)
    return {
        **rope_parameters(config),
        "new_decoder_architecture": new,
        "num_ln_in_parallel_attn": (2 if config.use_untied_layer_norm else 1) if new else None,
        "num_kv_heads": config.num_kv_heads,
        "multi_query": new or config.num_kv_heads == 1,
        "parallel_attn": config.parallel_blocks,
        "ffn_hidden_size": config.ffn_size,
        "activation": their_function(config.nonlinearity),
        "bias": config.use_ffn_bias,
        "alibi": False,
    }


def _rules(config: DecoderConfig) -> tuple[Rule, ...]:
    there = "transformer.h.{}"
    first, second = "input_layernorm", "post_attention_layernorm"
    if config.parallel_blocks and config.use_untied_layer_norm:
        first, second = "ln_attn", "ln_mlp"
    heads = interleaved_heads(config)
    return (
        same("embedding.weight", "transformer.word_embeddings.weight"),
        *both(same, "blocks.{}.attention_norm", f"{there}.{first}"),
        *both(permuted, "blocks.{}.attention.qkv", f"{there}.self_attention.query_key_value", heads),
        *both(same, "blocks.{}.attention.output", f"{there}.self_attention.dense"),
        *both(same, "blocks.{}.ffn_norm", f"{there}.{second}"),
        *both(same, "blocks.{}.ffn.input", f"{there}.mlp.dense_h_to_4h"),
        *both(same, "blocks.{}.ffn.output", f"{there}.mlp.dense_4h_to_h"),
        *both(same, "norm", "transformer.ln_f"),
        same("head.weight", "lm_head.weight"),
    )


FALCON = Format(
    model_type="falcon",
    architecture="FalconForCausalLM",
    models=("falcon",),
    keys={
        "vocab_size": Key("vocab_size", 65024),
        "hidden_size": Key("hidden_size", 4544),
        "num_hidden_layers": Key("num_hidden_layers", 32),
        "num_heads": Key("num_attention_heads", 71),
        "max_position_embeddings": Key("max_position_embeddings", 2048),
        "dropout_rate": Key("hidden_dropout", 0.0, "residual_dropout"),
        "attention_dropout_rate": Key("attention_dropout", 0.0, "attention_dropout"),
        "layer_norm_epsilon": Key("layer_norm_epsilon", 1e-5),
        "share_embedding_weights": Key("tie_word_embeddings", True),
    },
    section=_section,
    config=_config,
    refused={"alibi": False},
    rules=_rules,
)
