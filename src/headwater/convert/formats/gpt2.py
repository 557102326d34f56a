"""GPT-2 and GPT-3 style models in the format of `GPT2LMHeadModel`."""

from __future__ import annotations

from headwater.config.models import DecoderConfig
from headwater.convert.formats.base import Format, Key, function, their_function
from headwater.convert.rules import Rule, both, linear_transposed, same


def _rules(config: DecoderConfig) -> tuple[Rule, ...]:
    there = "transformer.h.{}"
    return (
        same("embedding.weight", "transformer.wte.weight"),
        same("position_embedding.weight", "transformer.wpe.weight"),
        *both(same, "blocks.{}.attention_norm", f"{there}.ln_1"),
        *linear_transposed("blocks.{}.attention.qkv", f"{there}.attn.c_attn"),
        *linear_transposed("blocks.{}.attention.output", f"{there}.attn.c_proj"),
        *both(same, "blocks.{}.ffn_norm", f"{there}.ln_2"),
        *linear_transposed("blocks.{}.ffn.input", f"{there}.mlp.c_fc"),
        *linear_transposed("blocks.{}.ffn.output", f"{there}.mlp.c_proj"),
        *both(same, "norm", "transformer.ln_f"),
        same("head.weight", "lm_head.weight"),
    )


GPT2 = Format(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    models=("gpt2", "gpt3"),
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
    section=lambda hf: {
        "nonlinearity": function(hf, "activation_function", "gelu_new"),
        "attention_type": "scaled_dot_product" if hf.get("scale_attn_weights", True) else "dot_product",
    },
    config=lambda config: {
        "activation_function": their_function(config.nonlinearity),
        "scale_attn_weights": config.attention_type == "scaled_dot_product",
    },
    refused={"add_cross_attention": False},
    rules=_rules,
    ignored=(".attn.bias", ".attn.masked_bias"),
)
