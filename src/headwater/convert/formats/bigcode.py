"""SantaCoder and StarCoder in the format of `GPTBigCodeForCausalLM`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headwater.config.models.decoder import DecoderConfig
from headwater.convert.formats.base import Format, function, grouped, interleaved_heads, their_function
from headwater.convert.formats.gpt2 import GPT2_BUFFERS, GPT2_KEYS, QKV, gpt2_rules, scores, their_scores
from headwater.convert.rules import Rule, both, permuted, same


def _section(hf: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **scores(hf),
        **grouped(1 if hf.get("multi_query", True) else None, hf["n_head"]),
        "nonlinearity": function(hf, "activation_function", "gelu_pytorch_tanh"),
    }


def _config(config: DecoderConfig) -> dict[str, Any]:
    return {
        **their_scores(config),
        "multi_query": config.num_kv_heads == 1,
        "activation_function": their_function(config.nonlinearity),
    }


def _rules(config: DecoderConfig) -> tuple[Rule, ...]:
    qkv = both(permuted, *QKV, interleaved_heads(config))
    return gpt2_rules(qkv, lambda ours, theirs: both(same, ours, theirs))


GPT_BIGCODE = Format(
    model_type="gpt_bigcode",
    architecture="GPTBigCodeForCausalLM",
    models=("starcoder", "santacoder"),
    keys=GPT2_KEYS,
    section=_section,
    config=_config,
    rules=_rules,
    ignored=GPT2_BUFFERS,
)
