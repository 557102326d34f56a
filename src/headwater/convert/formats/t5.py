"""T5, T5 1.1 and UL2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headwater.config.models.seq2seq import Seq2SeqConfig, StackName
from headwater.convert.formats.base import Format, Key, function, their_function
from headwater.convert.rules import Rule, same, stacked
from headwater.models.layers.feed_forward import GATED

_PREFIX = "gated-"


def _section(hf: Mapping[str, Any]) -> dict[str, Any]:
    # If the head does not share the embedding's weight, logits are not scaled. The library has two keys for
    # this.
    shared = hf.get("tie_word_embeddings") is not False and hf.get("scale_decoder_outputs") is not False
    return {
        "encoder_nonlinearity": _nonlinearity(hf.get("feed_forward_proj", "relu")),
        "share_embedding_weights": shared,
        "initializer": None,
    }


def _nonlinearity(name: str) -> str:
    if name == "gated-gelu":  # only this name means the tanh approximation in the library
        return "geglu_new"
    gated = name.startswith(_PREFIX)
    return function({"of": name.removeprefix(_PREFIX)}, "of", "relu", gated=gated)


def _config(config: Seq2SeqConfig) -> dict[str, Any]:
    kind = config.nonlinearity("encoder")
    gated = kind in GATED
    theirs = "gelu" if kind == "geglu_new" else their_function(kind, gated=gated)
    return {
        "num_decoder_layers": config.num_layers("decoder"),
        "feed_forward_proj": (_PREFIX if gated else "") + theirs,
        "tie_word_embeddings": config.share_embedding_weights,
        "scale_decoder_outputs": config.share_embedding_weights,
        "is_encoder_decoder": True,
        "decoder_start_token_id": config.start_token_id,
    }


def seq2seq_meaning(config: Seq2SeqConfig) -> dict[str, Any]:
    """Return the settings that decide the model's function and the names of its weights, by key."""
    keys = (
        "share_encoder_decoder_embedding", "share_embedding_weights", "d_model", "d_kv", "d_ff", "num_heads",
        "norm_type", "layer_norm_epsilon", "use_projection_bias_in_attention", "use_ffn_bias",
        "use_pre_encoder_decoder_layer_norm", "position_embedding_type",
    )  # fmt: skip
    meaning = {key: getattr(config, key) for key in keys} | {
        "src_vocab_size": config.source_tokens,
        "tgt_vocab_size": config.target_tokens,
        "embeddings_alpha": config.embeddings_scale,
        "output_logits_alpha": config.logits_scale,
    }
    stacks: tuple[StackName, ...] = ("encoder", "decoder")
    for stack in stacks:
        meaning |= {
            f"{stack}_num_hidden_layers": config.num_layers(stack),
            f"{stack}_nonlinearity": config.nonlinearity(stack),
            f"{stack}_attention_logits_alpha": config.attention_scale(stack),
        }
    if config.position_embedding_type == "relative":
        for key in ("relative_attention_num_buckets", "relative_attention_max_distance"):
            meaning[key] = getattr(config, key)
    return meaning


def _rules(config: Seq2SeqConfig) -> tuple[Rule, ...]:
    return (
        same("embedding.weight", "shared.weight"),
        same("head.weight", "lm_head.weight"),
        *_stack_rules(config, "encoder"),
        *_stack_rules(config, "decoder"),
    )


def _stack_rules(config: Seq2SeqConfig, stack: StackName) -> tuple[Rule, ...]:
    ours, theirs, inner = f"{stack}.blocks.{{}}", f"{stack}.block.{{}}.layer", config.inner_size
    last = 1 if stack == "encoder" else 2
    dense = f"{theirs}.{last}.DenseReluDense"
    gated = config.nonlinearity(stack) in GATED
    names = [f"{theirs}.0.SelfAttention.{name}.weight" for name in "qkv"]
    rules = (
        same(
            f"{stack}.relative_bias.weight",
            f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
        ),
        same(f"{ours}.attention_norm.weight", f"{theirs}.0.layer_norm.weight"),
        stacked(f"{ours}.attention.qkv.weight", names, (inner,) * 3),
        same(f"{ours}.attention.output.weight", f"{theirs}.0.SelfAttention.o.weight"),
        same(f"{ours}.ffn_norm.weight", f"{theirs}.{last}.layer_norm.weight"),
        same(f"{ours}.ffn.gate.weight", f"{dense}.wi_0.weight"),
        same(f"{ours}.ffn.input.weight", f"{dense}.{'wi_1' if gated else 'wi'}.weight"),
        same(f"{ours}.ffn.output.weight", f"{dense}.wo.weight"),
        same(f"{stack}.norm.weight", f"{stack}.final_layer_norm.weight"),
    )
    if stack == "encoder":
        return rules
    cross = f"{theirs}.1.EncDecAttention"
    return (
        *rules,
        same(f"{ours}.cross_attention_norm.weight", f"{theirs}.1.layer_norm.weight"),
        same(f"{ours}.cross_attention.query.weight", f"{cross}.q.weight"),
        stacked(
            f"{ours}.cross_attention.key_value.weight",
            [f"{cross}.{name}.weight" for name in "kv"],
            (inner,) * 2,
        ),
        same(f"{ours}.cross_attention.output.weight", f"{cross}.o.weight"),
    )


T5 = Format(
    model_type="t5",
    architecture="T5ForConditionalGeneration",
    models=("t5",),
    schema=Seq2SeqConfig,
    meaning=seq2seq_meaning,
    keys={
        "src_vocab_size": Key("vocab_size", 32128, "source_tokens"),
        "d_model": Key("d_model", 512),
        "d_kv": Key("d_kv", 64),
        "d_ff": Key("d_ff", 2048),
        "num_heads": Key("num_heads", 8),
        "encoder_num_hidden_layers": Key("num_layers", 6),
        "decoder_num_hidden_layers": Key("num_decoder_layers", None),
        "relative_attention_num_buckets": Key("relative_attention_num_buckets", 32),
        "relative_attention_max_distance": Key("relative_attention_max_distance", 128),
        "dropout_rate": Key("dropout_rate", 0.1),
        "layer_norm_epsilon": Key("layer_norm_epsilon", 1e-6),
        "initializer_factor": Key("initializer_factor", 1.0),
        "pad_token_id": Key("pad_token_id", 0),
        "decoder_start_token_id": Key("decoder_start_token_id", None),
    },
    section=_section,
    config=_config,
    rules=_rules,
    prefix="",
    ignored=(
        "encoder.embed_tokens.weight", "decoder.embed_tokens.weight",
        # stored in the first checkpoints, but not used
        "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",
    ),
)  # fmt: skip
