"""GPT-J and CodeGen: rotary decoders whose attention and feed-forward layer read the same norm."""

from __future__ import annotations

from collections.abc import Callable

import torch

from headwater.config.models.decoder import DecoderConfig
from headwater.convert.formats.base import Format, Key, function, qkv_rows, their_function
from headwater.convert.rules import Rule, both, permuted, same, stacked

_CORES = 4
"""Groups of rows in CodeGen's projection; each group has queries, values and keys, in this order."""

_KEYS = {
    "vocab_size": Key("vocab_size", 50400),
    "hidden_size": Key("n_embd", 4096),
    "max_position_embeddings": Key("n_positions", 2048),
    "num_hidden_layers": Key("n_layer", 28),
    "num_heads": Key("n_head", 16),
    "rotary_dim": Key("rotary_dim", 64, "rotary_size"),
    "filter_size": Key("n_inner", None, "ffn_size"),
    "dropout_rate": Key("resid_pdrop", 0.0, "residual_dropout"),
    "embedding_dropout_rate": Key("embd_pdrop", 0.0, "embedding_dropout"),
    "attention_dropout_rate": Key("attn_pdrop", 0.0, "attention_dropout"),
    "layer_norm_epsilon": Key("layer_norm_epsilon", 1e-5),
    "share_embedding_weights": Key("tie_word_embeddings", False),
}


def _rules(config: DecoderConfig, qkv: Rule) -> tuple[Rule, ...]:
    there = "transformer.h.{}"
    return (
        same("embedding.weight", "transformer.wte.weight"),
        *both(same, "blocks.{}.attention_norm", f"{there}.ln_1"),
        qkv,
        same("blocks.{}.attention.output.weight", f"{there}.attn.out_proj.weight"),
        *both(same, "blocks.{}.ffn.input", f"{there}.mlp.fc_in"),
        *both(same, "blocks.{}.ffn.output", f"{there}.mlp.fc_out"),
        *both(same, "norm", "transformer.ln_f"),
        *both(same, "head", "lm_head"),
    )


def _gptj_rules(config: DecoderConfig) -> tuple[Rule, ...]:
    names = [f"transformer.h.{{}}.attn.{name}_proj.weight" for name in "qkv"]
    return _rules(config, stacked("blocks.{}.attention.qkv.weight", names, qkv_rows(config)))


def _codegen_rules(config: DecoderConfig) -> tuple[Rule, ...]:
    query, key, value = torch.arange(3 * config.hidden_size).view(3, _CORES, -1)
    order = torch.stack((query, value, key), dim=1).flatten()
    there = "transformer.h.{}.attn.qkv_proj.weight"
    return _rules(config, permuted("blocks.{}.attention.qkv.weight", there, order))


def _format(model_type: str, architecture: str, rules: Callable[[DecoderConfig], tuple[Rule, ...]]) -> Format:
    return Format(
        model_type=model_type,
        architecture=architecture,
        models=(model_type,),
        keys=_KEYS,
        section=lambda hf: {"nonlinearity": function(hf, "activation_function", "gelu_new")},
        config=lambda config: {"activation_function": their_function(config.nonlinearity)},
        rules=rules,
        ignored=(".attn.bias", ".attn.masked_bias", ".attn.causal_mask"),
    )


GPTJ = _format("gptj", "GPTJForCausalLM", _gptj_rules)
CODEGEN = _format("codegen", "CodeGenForCausalLM", _codegen_rules)
