"""GPT-NeoX and Pythia."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headwater.config.models.decoder import DecoderConfig
from headwater.convert.formats.base import (
    Format,
    Key,
    function,
    interleaved_heads,
    rope_parameters,
    rotary,
    their_function,
)
from headwater.convert.rules import Rule, both, permuted, same


def _section(hf: Mapping[str, Any]) -> dict[str, Any]:
    share = (hf.get("rope_parameters") or {}).get("partial_rotary_factor", hf.get("rotary_pct", 0.25))
    bias = hf.get("attention_bias", True)
    return {
        **rotary({**hf, "rope_theta": hf.get("rotary_emb_base", hf.get("rope_theta", 10000.0))}),
        "rotary_dim": int(hf["hidden_size"] // hf["num_attention_heads"] * share),
        "nonlinearity": function(hf, "hidden_act", "gelu"),
        "use_projection_bias_in_attention": bias,
        "use_ffn_bias_in_attention": bias,
    }


def _config(config: DecoderConfig) -> dict[str, Any]:
    rope = rope_parameters(config)["rope_parameters"]
    return {
        "rope_parameters": rope | {"partial_rotary_factor": config.rotary_size / config.head_size},
        "attention_bias": config.use_projection_bias_in_attention,
        "hidden_act": their_function(config.nonlinearity),
    }


def _rules(config: DecoderConfig) -> tuple[Rule, ...]:
    there = "gpt_neox.layers.{}"
    heads = interleaved_heads(config)
    return (
        same("embedding.weight", "gpt_neox.embed_in.weight"),
        *both(same, "blocks.{}.attention_norm", f"{there}.input_layernorm"),
        *both(permuted, "blocks.{}.attention.qkv", f"{there}.attention.query_key_value", heads),
        *both(same, "blocks.{}.attention.output", f"{there}.attention.dense"),
        *both(same, "blocks.{}.ffn_norm", f"{there}.post_attention_layernorm"),
        *both(same, "blocks.{}.ffn.input", f"{there}.mlp.dense_h_to_4h"),
        *both(same, "blocks.{}.ffn.output", f"{there}.mlp.dense_4h_to_h"),
        *both(same, "norm", "gpt_neox.final_layer_norm"),
        same("head.weight", "embed_out.weight"),
    )


GPT_NEOX = Format(
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    models=("gpt-neox",),
    keys={
        "vocab_size": Key("vocab_size", 50432),
        "hidden_size": Key("hidden_size", 6144),
        "num_hidden_layers": Key("num_hidden_layers", 44),
        "num_heads": Key("num_attention_heads", 64),
        "filter_size": Key("intermediate_size", 24576, "ffn_size"),
        "max_position_embeddings": Key("max_position_embeddings", 2048),
        "dropout_rate": Key("hidden_dropout", 0.0, "residual_dropout"),
        "attention_dropout_rate": Key("attention_dropout", 0.0, "attention_dropout"),
        "layer_norm_epsilon": Key("layer_norm_eps", 1e-5),
        "share_embedding_weights": Key("tie_word_embeddings", False),
        "parallel_blocks": Key("use_parallel_residual", True),
    },
    section=_section,
    config=_config,
    rules=_rules,
    prefix="gpt_neox.",
    head="embed_out",
    ignored=(".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"),
)
