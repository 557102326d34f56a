"""Llama, Mistral, Mixtral and Gemma 2: rotary decoders with RMSNorm and gated feed-forward layers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from headwater.config.models.decoder import DecoderConfig
from headwater.convert.formats.base import (
    Format,
    Key,
    function,
    grouped,
    qkv_rows,
    rope_parameters,
    rotary,
    their_function,
)
from headwater.convert.rules import Rule, both, same, stacked

_KEYS = {
    "vocab_size": Key("vocab_size"),
    "hidden_size": Key("hidden_size"),
    "num_hidden_layers": Key("num_hidden_layers"),
    "num_heads": Key("num_attention_heads"),
    "filter_size": Key("intermediate_size", value="ffn_size"),
    "attention_dropout_rate": Key("attention_dropout", 0.0, "attention_dropout"),
}


def _section(
    hf: Mapping[str, Any], function_key: str = "hidden_act", default: str = "silu"
) -> dict[str, Any]:
    heads, head_size = hf["num_attention_heads"], hf.get("head_dim")
    bias = hf.get("attention_bias", False)
    return {
        **rotary(hf),
        **grouped(hf.get("num_key_value_heads"), heads),
        "attention_inner_dim": head_size * heads if head_size else None,
        "nonlinearity": function(hf, function_key, default, gated=True),
        "use_projection_bias_in_attention": bias,
        "use_ffn_bias_in_attention": bias,
        "use_ffn_bias": hf.get("mlp_bias", False),
    }


def _config(config: DecoderConfig, function_key: str = "hidden_act") -> dict[str, Any]:
    return {
        **rope_parameters(config),
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_size,
        function_key: their_function(config.nonlinearity, gated=True),
    }


def _llama_config(config: DecoderConfig) -> dict[str, Any]:
    biases = {"attention_bias": config.use_projection_bias_in_attention, "mlp_bias": config.use_ffn_bias}
    return _config(config) | biases


def _attention_rules(config: DecoderConfig) -> tuple[Rule, ...]:
    there = "model.layers.{}"
    return (
        same("embedding.weight", "model.embed_tokens.weight"),
        same("blocks.{}.attention_norm.weight", f"{there}.input_layernorm.weight"),
        *both(
            stacked,
            "blocks.{}.attention.qkv",
            [f"{there}.self_attn.{name}_proj" for name in "qkv"],
            qkv_rows(config),
        ),
        *both(same, "blocks.{}.attention.output", f"{there}.self_attn.o_proj"),
        same("norm.weight", "model.norm.weight"),
        same("head.weight", "lm_head.weight"),
    )


_FFN_RULES = (
    *both(same, "blocks.{}.ffn.gate", "model.layers.{}.mlp.gate_proj"),
    *both(same, "blocks.{}.ffn.input", "model.layers.{}.mlp.up_proj"),
    *both(same, "blocks.{}.ffn.output", "model.layers.{}.mlp.down_proj"),
)
_SECOND_NORM = same("blocks.{}.ffn_norm.weight", "model.layers.{}.post_attention_layernorm.weight")


def _llama_rules(config: DecoderConfig) -> tuple[Rule, ...]:
    return (*_attention_rules(config), _SECOND_NORM, *_FFN_RULES)


LLAMA = Format(
    model_type="llama",
    architecture="LlamaForCausalLM",
    models=("llama",),
    keys={
        **_KEYS,
        "max_position_embeddings": Key("max_position_embeddings", 2048),
        "layer_norm_epsilon": Key("rms_norm_eps", 1e-6),
        "share_embedding_weights": Key("tie_word_embeddings", False),
    },
    section=_section,
    config=_llama_config,
    rules=_llama_rules,
    prefix="model.",
    ignored=(".rotary_emb.inv_freq",),
)


def _mistral_section(hf: Mapping[str, Any]) -> dict[str, Any]:
    return _section({"num_key_value_heads": 8, **hf})


MISTRAL = Format(
    model_type="mistral",
    architecture="MistralForCausalLM",
    models=("mistral",),
    keys={
        **_KEYS,
        "max_position_embeddings": Key("max_position_embeddings", 131072),
        "layer_norm_epsilon": Key("rms_norm_eps", 1e-6),
        "share_embedding_weights": Key("tie_word_embeddings", False),
        "attention_sliding_window_length": Key("sliding_window", 4096),
    },
    section=_mistral_section,
    config=_config,
    rules=_llama_rules,
    prefix="model.",
)


def _mixtral_rules(config: DecoderConfig) -> tuple[Rule, ...]:
    assert config.moe is not None, "the format was checked before"
    experts, there = config.moe.num_experts, "model.layers.{}.block_sparse_moe"
    sizes = {
        "gate": ("w1", config.ffn_size),
        "output": ("w2", config.hidden_size),
        "input": ("w3", config.ffn_size),
    }
    return (
        *_attention_rules(config),
        _SECOND_NORM,
        same("blocks.{}.ffn.router.weight", f"{there}.gate.weight"),
        *(
            stacked(
                f"blocks.{{}}.ffn.{ours}.weight",
                [f"{there}.experts.{expert}.{theirs}.weight" for expert in range(experts)],
                [rows] * experts,
            )
            for ours, (theirs, rows) in sizes.items()
        ),
    )


def _mixtral_section(hf: Mapping[str, Any]) -> dict[str, Any]:
    moe = {
        "num_experts": hf.get("num_local_experts", 8),
        "top_k": hf.get("num_experts_per_tok", 2),
        "load_balancing_loss_coef": hf.get("router_aux_loss_coef", 0.001),
    }
    return _mistral_section({"rope_theta": 1e6, **hf}) | {"moe": moe}


def _mixtral_config(config: DecoderConfig) -> dict[str, Any]:
    if config.moe is None:
        return _config(config)
    return _config(config) | {
        "num_local_experts": config.moe.num_experts,
        "num_experts_per_tok": config.moe.top_k,
        "router_aux_loss_coef": config.moe.load_balancing_loss_coef,
    }


MIXTRAL = Format(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    models=("mixtral",),
    keys={
        **_KEYS,
        "max_position_embeddings": Key("max_position_embeddings", 131072),
        "layer_norm_epsilon": Key("rms_norm_eps", 1e-5),
        "share_embedding_weights": Key("tie_word_embeddings", False),
        "attention_sliding_window_length": Key("sliding_window", None),
    },
    section=_mixtral_section,
    config=_mixtral_config,
    rules=_mixtral_rules,
    prefix="model.",
)


def _gemma2_section(hf: Mapping[str, Any]) -> dict[str, Any]:
    head_size = hf.get("head_dim", 256)
    filled = {"num_key_value_heads": 4, **hf, "head_dim": head_size}
    return _section(filled, "hidden_activation", "gelu_pytorch_tanh") | {
        "embeddings_scale": math.sqrt(hf["hidden_size"]),
        "attention_logits_alpha": math.sqrt(head_size / hf.get("query_pre_attn_scalar", 256)),
    }


def _gemma2_config(config: DecoderConfig) -> dict[str, Any]:
    alternating = ("sliding_attention", "full_attention")
    return _config(config, "hidden_activation") | {
        "query_pre_attn_scalar": round(config.attention_scale(0) ** -2),
        "layer_types": [alternating[layer % 2] for layer in range(config.num_hidden_layers)],
        "attention_bias": config.use_projection_bias_in_attention,
    }


def _gemma2_rules(config: DecoderConfig) -> tuple[Rule, ...]:
    there = "model.layers.{}"
    return (
        *_attention_rules(config),
        same("blocks.{}.attention_post_norm.weight", f"{there}.post_attention_layernorm.weight"),
        same("blocks.{}.ffn_norm.weight", f"{there}.pre_feedforward_layernorm.weight"),
        same("blocks.{}.ffn_post_norm.weight", f"{there}.post_feedforward_layernorm.weight"),
        *_FFN_RULES,
    )


GEMMA2 = Format(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    models=("gemma2",),
    keys={
        **_KEYS,
        "max_position_embeddings": Key("max_position_embeddings", 8192),
        "layer_norm_epsilon": Key("rms_norm_eps", 1e-6),
        "share_embedding_weights": Key("tie_word_embeddings", True),
        "attention_sliding_window_length": Key("sliding_window", 4096),
        "attention_logit_softcapping": Key("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": Key("final_logit_softcapping", 30.0),
    },
    section=_gemma2_section,
    config=_gemma2_config,
    refused={"use_bidirectional_attention": None},
    rules=_gemma2_rules,
    prefix="model.",
)
