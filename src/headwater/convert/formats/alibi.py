"""BLOOM and MPT: decoders with ALiBi, attention biases by distance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headwater.config.models.decoder import DecoderConfig
from headwater.convert.formats.base import Format, Key, interleaved_heads
from headwater.convert.rules import TRAIN_UNCONVERTED, Rule, both, permuted, same
from headwater.core.errors import ConfigError


def _bloom_rules(config: DecoderConfig) -> tuple[Rule, ...]:
    there = "transformer.h.{}"
    heads = interleaved_heads(config)
    return (
        same("embedding.weight", "transformer.word_embeddings.weight"),
        *both(same, "embedding_norm", "transformer.word_embeddings_layernorm"),
        *both(same, "blocks.{}.attention_norm", f"{there}.input_layernorm"),
        *both(permuted, "blocks.{}.attention.qkv", f"{there}.self_attention.query_key_value", heads),
        *both(same, "blocks.{}.attention.output", f"{there}.self_attention.dense"),
        *both(same, "blocks.{}.ffn_norm", f"{there}.post_attention_layernorm"),
        *both(same, "blocks.{}.ffn.input", f"{there}.mlp.dense_h_to_4h"),
        *both(same, "blocks.{}.ffn.output", f"{there}.mlp.dense_4h_to_h"),
        *both(same, "norm", "transformer.ln_f"),
        same("head.weight", "lm_head.weight"),
    )


BLOOM = Format(
    model_type="bloom",
    architecture="BloomForCausalLM",
    models=("bloom",),
    keys={
        "vocab_size": Key("vocab_size", 250880),
        "hidden_size": Key("hidden_size", 64),
        "num_hidden_layers": Key("n_layer", 2),
        "num_heads": Key("n_head", 8),
        "max_position_embeddings": Key("seq_length", 2048),
        "dropout_rate": Key("hidden_dropout", 0.0, "residual_dropout"),
        "attention_dropout_rate": Key("attention_dropout", 0.0, "attention_dropout"),
        "layer_norm_epsilon": Key("layer_norm_epsilon", 1e-5),
        "share_embedding_weights": Key("tie_word_embeddings", True),
    },
    refused={"apply_residual_connection_post_layernorm": False},
    rules=_bloom_rules,
)


def _mpt_section(hf: Mapping[str, Any]) -> dict[str, Any]:
    attention = hf.get("attn_config") or {}
    only = {
        "attn_type": "multihead_attention", "alibi": True, "alibi_bias_max": 8, "clip_qkv": None,
        "qk_ln": False, "prefix_lm": False, "softmax_scale": None,
    }  # fmt: skip
    for key, value in only.items():
        if attention.get(key, value) != value:
            raise ConfigError(
                f"expected {key} to be {value!r}, got {attention[key]!r}",
                where="config.json, attn_config",
                remedy=TRAIN_UNCONVERTED,
            )
    heads = hf["n_heads"]
    if heads & (heads - 1):
        raise ConfigError(
            f"expected n_heads to be a power of 2, got {heads}: MPT has other ALiBi slopes then",
            where="config.json",
            remedy=TRAIN_UNCONVERTED,
        )
    return {
        "filter_size": hf["d_model"] * hf.get("expansion_ratio", 4),
        "attention_dropout_rate": float(attention.get("attn_pdrop", 0.0)),
    }


def _mpt_config(config: DecoderConfig) -> dict[str, Any]:
    return {
        "expansion_ratio": config.ffn_size // config.hidden_size,
        "attn_config": {"alibi": True},
        "no_bias": True,
    }


def _mpt_rules(config: DecoderConfig) -> tuple[Rule, ...]:
    there = "transformer.blocks.{}"
    return (
        same("embedding.weight", "transformer.wte.weight"),
        same("blocks.{}.attention_norm.weight", f"{there}.norm_1.weight"),
        same("blocks.{}.attention.qkv.weight", f"{there}.attn.Wqkv.weight"),
        same("blocks.{}.attention.output.weight", f"{there}.attn.out_proj.weight"),
        same("blocks.{}.ffn_norm.weight", f"{there}.norm_2.weight"),
        same("blocks.{}.ffn.input.weight", f"{there}.ffn.up_proj.weight"),
        same("blocks.{}.ffn.output.weight", f"{there}.ffn.down_proj.weight"),
        same("norm.weight", "transformer.norm_f.weight"),
        same("head.weight", "lm_head.weight"),
    )


MPT = Format(
    model_type="mpt",
    architecture="MptForCausalLM",
    models=("mpt",),
    keys={
        "vocab_size": Key("vocab_size", 50368),
        "hidden_size": Key("d_model", 2048),
        "num_hidden_layers": Key("n_layers", 24),
        "num_heads": Key("n_heads", 16),
        "max_position_embeddings": Key("max_seq_len", 2048),
        "dropout_rate": Key("resid_pdrop", 0.0, "residual_dropout"),
        "embedding_dropout_rate": Key("emb_pdrop", 0.0, "embedding_dropout"),
        "layer_norm_epsilon": Key("layer_norm_epsilon", 1e-5),
        "share_embedding_weights": Key("tie_word_embeddings", True),
    },
    section=_mpt_section,
    config=_mpt_config,
    refused={"no_bias": True, "logit_scale": None},
    rules=_mpt_rules,
)
