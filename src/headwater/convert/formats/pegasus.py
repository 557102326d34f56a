"""The original transformer, with norms before each layer, in the format of `PegasusForConditionalGeneration`.

This class of the transformers library computes the same function: positions are sinusoidal, and a norm
follows the last block of each stack. But it puts all sines before all cosines, while ours alternate. The
hidden dimension is therefore permuted in every tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from headwater.config.models.seq2seq import Seq2SeqConfig, StackName
from headwater.convert.formats.base import Format, Key, function, their_function
from headwater.convert.formats.t5 import seq2seq_meaning
from headwater.convert.rules import (
    TRAIN_UNCONVERTED,
    Rule,
    both,
    reordered,
    repeated,
    same,
    scaled,
    stacked,
    with_constant,
)
from headwater.core.errors import ConfigError
from headwater.models.layers.positions import sinusoidal_positions

_SHARED_SIZES = {
    "encoder_ffn_dim": "decoder_ffn_dim",
    "encoder_attention_heads": "decoder_attention_heads",
}
"""Key of the encoder -> key of the decoder that must have the same value."""


def _section(hf: Mapping[str, Any]) -> dict[str, Any]:
    for encoder, decoder in _SHARED_SIZES.items():
        if hf.get(encoder) != hf.get(decoder):
            raise ConfigError(
                f"expected equal {encoder} and {decoder}, got {hf.get(encoder)} and {hf.get(decoder)}",
                where="config.json",
                remedy=TRAIN_UNCONVERTED,
            )
    width = hf["d_model"]
    return {
        "name": "transformer",
        "d_kv": width // hf["encoder_attention_heads"],
        "encoder_nonlinearity": function(hf, "activation_function", "gelu"),
        "embeddings_alpha": 1.0 if hf.get("scale_embedding", False) else width**-0.5,
        "tgt_max_position_embeddings": hf.get("max_position_embeddings", 1024),
        "use_pre_encoder_decoder_layer_norm": True,
        "use_projection_bias_in_attention": True,
    }


def _config(config: Seq2SeqConfig) -> dict[str, Any]:
    return {
        "activation_function": their_function(config.nonlinearity("encoder")),
        "decoder_layers": config.num_layers("decoder"),
        "decoder_ffn_dim": config.d_ff,
        "decoder_attention_heads": config.num_heads,
        "decoder_start_token_id": config.start_token_id,
        "max_position_embeddings": _positions(config),
        "scale_embedding": config.embeddings_scale / config.logits_scale > 1,
        "attention_dropout": config.dropout_rate,
        "forced_eos_token_id": None,
        "is_encoder_decoder": True,
    }


def _meaning(config: Seq2SeqConfig) -> dict[str, Any]:
    """Return the settings that decide the function, except missing biases and logit scales.

    The weights express these two: as zero biases, and as a factor of the embedding.
    """
    meaning = seq2seq_meaning(config)
    meaning["embeddings_alpha"] = config.embeddings_scale / config.logits_scale
    for absorbed in ("output_logits_alpha", "use_projection_bias_in_attention"):
        del meaning[absorbed]
    return meaning


def _positions(config: Seq2SeqConfig) -> int:
    return max(config.max_length("encoder"), config.max_length("decoder"))


def _rules(config: Seq2SeqConfig) -> tuple[Rule, ...]:
    width, vocabulary = config.d_model, config.source_tokens
    embedding = repeated("embedding.weight", ["model.shared.weight"])
    embedding = scaled(reordered(embedding, _order(width), dim=1), config.logits_scale)
    return (
        with_constant(embedding, "final_logits_bias", lambda: torch.zeros(1, vocabulary)),
        *_stack_rules(config, "encoder"),
        *_stack_rules(config, "decoder"),
    )


def _order(width: int) -> Tensor:
    """Return our index of each element of Pegasus's positions: sines, then cosines; ours alternate."""
    return torch.arange(width).view(-1, 2).t().flatten()


def _stack_rules(config: Seq2SeqConfig, stack: StackName) -> list[Rule]:
    ours, theirs = f"{stack}.blocks.{{}}", f"model.{stack}.layers.{{}}"
    width, order = config.d_model, _order(config.d_model)

    def norm(here: str, there: str) -> list[Rule]:
        return [reordered(rule, order) for rule in both(same, here, there)]

    def reading(here: str, there: list[str], rows: int) -> list[Rule]:
        """Return the rules of Pegasus's layers that read hidden states and are stacked in one layer of ours.

        If our layer has no bias, the biases in the checkpoint must be 0.
        """
        rules = both(stacked, here, there, (rows,) * len(there))
        weight = reordered(rules[0], order, dim=1)
        if config.use_projection_bias_in_attention:
            return [weight, rules[1]]
        for name in there:
            weight = with_constant(weight, f"{name}.bias", lambda: torch.zeros(rows))
        return [weight]

    def projection(here: str, there: str) -> Rule:
        """Return the rule of an attention's output projection. Our model has no bias: Pegasus's must be 0."""
        weight = reordered(same(f"{here}.weight", f"{there}.weight"), order)
        return with_constant(weight, f"{there}.bias", lambda: torch.zeros(width))

    def attention(there: str, names: str) -> list[str]:
        return [f"{theirs}.{there}.{name}_proj" for name in names]

    first, bias = both(same, f"{ours}.ffn.input", f"{theirs}.fc1")
    last_norm, its_bias = norm(f"{stack}.norm", f"model.{stack}.layer_norm")
    table = f"model.{stack}.embed_positions.weight"
    rules = [
        with_constant(last_norm, table, lambda: sinusoidal_positions(_positions(config), width)[:, order]),
        its_bias,
        *norm(f"{ours}.attention_norm", f"{theirs}.self_attn_layer_norm"),
        *reading(f"{ours}.attention.qkv", attention("self_attn", "qkv"), config.inner_size),
        projection(f"{ours}.attention.output", f"{theirs}.self_attn.out_proj"),
        *norm(f"{ours}.ffn_norm", f"{theirs}.final_layer_norm"),
        reordered(first, order, dim=1),
        bias,
        *(reordered(rule, order) for rule in both(same, f"{ours}.ffn.output", f"{theirs}.fc2")),
    ]
    if stack == "encoder":
        return rules
    return [
        *rules,
        *norm(f"{ours}.cross_attention_norm", f"{theirs}.encoder_attn_layer_norm"),
        *reading(f"{ours}.cross_attention.query", attention("encoder_attn", "q"), config.inner_size),
        *reading(f"{ours}.cross_attention.key_value", attention("encoder_attn", "kv"), config.inner_size),
        projection(f"{ours}.cross_attention.output", f"{theirs}.encoder_attn.out_proj"),
    ]


PEGASUS = Format(
    model_type="pegasus",
    architecture="PegasusForConditionalGeneration",
    models=("transformer",),
    schema=Seq2SeqConfig,
    meaning=_meaning,
    keys={
        "src_vocab_size": Key("vocab_size", 50265, "source_tokens"),
        "d_model": Key("d_model", 1024),
        "d_ff": Key("encoder_ffn_dim", 4096),
        "num_heads": Key("encoder_attention_heads", 16),
        "encoder_num_hidden_layers": Key("encoder_layers", 12),
        "decoder_num_hidden_layers": Key("decoder_layers", 12),
        "src_max_position_embeddings": Key("max_position_embeddings", 1024),
        "dropout_rate": Key("dropout", 0.1),
        "relu_dropout_rate": Key("activation_dropout", 0.0, "ffn_dropout"),
        "pad_token_id": Key("pad_token_id", 0),
        "decoder_start_token_id": Key("decoder_start_token_id", None),
    },
    section=_section,
    config=_config,
    refused={"tie_word_embeddings": True},
    rules=_rules,
    prefix="model.",
    others=("lm_head.", "final_logits_bias"),
    ignored=("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"),
)
