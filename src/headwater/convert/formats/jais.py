"""Jais and BTLM: decoders with ALiBi, SwiGLU and muP, which are not part of the transformers library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headwater.config.models.decoder import DecoderConfig
from headwater.convert.formats.base import Format
from headwater.convert.formats.gpt2 import (
    GPT2_BUFFERS,
    GPT2_KEYS,
    QKV,
    SCALE_BY_LAYER,
    gpt2_rules,
    scores,
    their_scores,
)
from headwater.convert.rules import Rule, linear_transposed
from headwater.core.errors import ConfigError


def _rules(config: DecoderConfig) -> tuple[Rule, ...]:
    gate = linear_transposed("blocks.{}.ffn.gate", "transformer.h.{}.mlp.c_fc2")
    return (*gpt2_rules(linear_transposed(*QKV)), *gate)


_ONLY = {"position_embedding_type": "alibi", "activation_function": "swiglu"}
"""Key -> value that a `config.json` must have. The key must be there, because its default is different."""


def _section(hf: Mapping[str, Any]) -> dict[str, Any]:
    for key, only in _ONLY.items():
        if hf.get(key) != only:
            raise ConfigError(
                f"expected {key} to be {only!r}, got {hf.get(key)!r}",
                where="config.json",
                remedy=f"import a model with {key}: {only}",
            )
    # In the first releases these keys do not have the prefix "mup_".
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
        **scores(hf),
    }


def _config(config: DecoderConfig) -> dict[str, Any]:
    return {
        **_ONLY,
        "mup_width_scale": config.logits_scale,
        "mup_output_alpha": 1.0,
        "mup_embeddings_scale": config.embeddings_scale,
        "mup_scale_qk_dot_by_d": config.scale_qk_dot_by_d,
        **their_scores(config),
    }


def _format(model: str, architecture: str) -> Format:
    return Format(
        model_type=model,
        architecture=architecture,
        models=(model,),
        keys=GPT2_KEYS | SCALE_BY_LAYER,
        section=_section,
        config=_config,
        refused={"add_cross_attention": False, "alibi_scaling": None},
        rules=_rules,
        ignored=(*GPT2_BUFFERS, "relative_pe.slopes"),
    )


JAIS = _format("jais", "JAISLMHeadModel")
BTLM = _format("btlm", "BTLMLMHeadModel")
