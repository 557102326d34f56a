"""Jais and BTLM: decoders with ALiBi, SwiGLU and muP, whose classes transformers does not have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headwater.config.models import DecoderConfig
from headwater.convert.formats.base import Format, Key
from headwater.convert.rules import Rule, both, linear_transposed, same
from headwater.core.errors import ConfigError


def _rules(config: DecoderConfig) -> tuple[Rule, ...]:
    there = "transformer.h.{}"
    return (
        same("embedding.weight", "transformer.wte.weight"),
        *both(same, "blocks.{}.attention_norm", f"{there}.ln_1"),
        *linear_transposed("blocks.{}.attention.qkv", f"{there}.attn.c_attn"),
        *linear_transposed("blocks.{}.attention.output", f"{there}.attn.c_proj"),
        *both(same, "blocks.{}.ffn_norm", f"{there}.ln_2"),
        *linear_transposed("blocks.{}.ffn.gate", f"{there}.mlp.c_fc2"),
        *linear_transposed("blocks.{}.ffn.input", f"{there}.mlp.c_fc"),
        *linear_transposed("blocks.{}.ffn.output", f"{there}.mlp.c_proj"),
        *both(same, "norm", "transformer.ln_f"),
        same("head.weight", "lm_head.weight"),
    )


_ONLY = {"position_embedding_type": "alibi", "activation_function": "swiglu"}
"""What a config must say, since its absence means something else there."""


def _section(hf: Mapping[str, Any]) -> dict[str, Any]:
    for key, only in _ONLY.items():
        if hf.get(key) != only:
            raise ConfigError(
                f"{key} is {hf.get(key)!r}, and only {only!r} can be imported",
                where="config.json",
                remedy="import another model",
            )
    # The first releases leave the common prefix of these keys out.
    width, alpha, embeddings = (
        float(hf.get(f"mup_{key}", hf.get(key, 1.0)))
        for key in ("width_scale", "output_alpha", "embeddings_scale")
    )
    by_size = hf.get("mup_scale_qk_dot_by_d", hf.get("scale_qk_dot_by_d", False))
    return {
        "position_embedding_type": "alibi",
        "nonlinearity": "swiglu",
        "output_logits_scale": width * alpha,
        "embeddings_scale": embeddings,
        "scale_qk_dot_by_d": bool(by_size),
        "attention_type": "scaled_dot_product" if hf.get("scale_attn_weights", True) else "dot_product",
    }


def _config(config: DecoderConfig) -> dict[str, Any]:
    return {
        **_ONLY,
        "mup_width_scale": config.logits_scale,
        "mup_output_alpha": 1.0,
        "mup_embeddings_scale": config.embeddings_scale,
        "mup_scale_qk_dot_by_d": config.scale_qk_dot_by_d,
        "scale_attn_weights": config.attention_type == "scaled_dot_product",
    }


def _format(model: str, architecture: str) -> Format:
    return Format(
        model_type=model,
        architecture=architecture,
        models=(model,),
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
            "scale_qk_dot_by_layer_idx": Key("scale_attn_by_inverse_layer_idx", False),
        },
        section=_section,
        config=_config,
        refused={"add_cross_attention": False, "alibi_scaling": None},
        rules=_rules,
        ignored=(".attn.bias", ".attn.masked_bias", "relative_pe.slopes"),
    )


JAIS = _format("jais", "JAISLMHeadModel")
BTLM = _format("btlm", "BTLMLMHeadModel")
