"""LLaVA: CLIP's image encoder, a projector, and a Llama or Mistral decoder."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from headwater.config.models.decoder import DecoderConfig
from headwater.config.models.multimodal import ImageModelConfig, LlavaConfig, MultimodalSection
from headwater.convert.formats.base import Format, Key, function, their_function
from headwater.convert.formats.llama import LLAMA, MISTRAL
from headwater.convert.formats.vit import both_sizes, encoder_meaning, reshaped
from headwater.convert.rules import Rule, both, same, stacked
from headwater.core.errors import ConfigError

_LAYER = {
    "attention.output": "self_attn.out_proj",
    "attention_norm": "layer_norm1",
    "ffn.input": "mlp.fc1",
    "ffn.output": "mlp.fc2",
    "ffn_norm": "layer_norm2",
}


def _clip_rules(config: ImageModelConfig) -> tuple[Rule, ...]:
    there = "encoder.layers.{}"
    patches = (config.num_channels, *config.patch_size)
    return (
        reshaped("patches.weight", "embeddings.patch_embedding.weight", patches),
        same("class_token.weight", "embeddings.class_embedding"),
        same("positions.weight", "embeddings.position_embedding.weight"),
        *both(same, "embedding_norm", "pre_layrnorm"),
        *both(
            stacked,
            "blocks.{}.attention.qkv",
            [f"{there}.self_attn.{name}_proj" for name in "qkv"],
            (config.hidden_size,) * 3,
        ),
        *(
            rule
            for ours, theirs in _LAYER.items()
            for rule in both(same, f"blocks.{{}}.{ours}", f"{there}.{theirs}")
        ),
        *both(same, "norm", "post_layernorm"),
    )


def _clip_section(hf: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "use_post_embed_layer_norm": True,
        "use_embed_proj_bias": False,
        "nonlinearity": function(hf, "hidden_act", "quick_gelu"),
        "image_size": both_sizes(hf.get("image_size", 224)),
        "patch_size": both_sizes(hf.get("patch_size", 32)),
    }


def _clip_config(config: ImageModelConfig) -> dict[str, Any]:
    return {
        "hidden_act": their_function(config.nonlinearity),
        "image_size": config.image_size[0],
        "patch_size": config.patch_size[0],
    }


_CLIP = Format(
    model_type="clip_vision_model",
    architecture="CLIPVisionModel",
    models=("ViTModel",),
    schema=ImageModelConfig,
    meaning=encoder_meaning,
    keys={
        "hidden_size": Key("hidden_size", 768),
        "filter_size": Key("intermediate_size", 3072),
        "num_hidden_layers": Key("num_hidden_layers", 12),
        "num_heads": Key("num_attention_heads", 12),
        "num_channels": Key("num_channels", 3),
        "layer_norm_epsilon": Key("layer_norm_eps", 1e-5),
        "attention_dropout_rate": Key("attention_dropout", 0.0, "attention_dropout"),
    },
    section=_clip_section,
    config=_clip_config,
    rules=_clip_rules,
)

_SMALLEST = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
_TEXTS = {
    "llama": (LLAMA, {**_SMALLEST, "vocab_size": 32000, "intermediate_size": 11008}),
    "mistral": (MISTRAL, {**_SMALLEST, "vocab_size": 32000, "intermediate_size": 14336}),
}
"""Formats of language models by `model_type`, with the sizes that published checkpoints omit."""


def _text_from_hf(hf: Mapping[str, Any]) -> DecoderConfig:
    kind = hf.get("model_type", "llama")
    if kind not in _TEXTS:
        raise ConfigError(
            f"expected a language model of type {' or '.join(_TEXTS)}, got {kind}",
            where="config.json, text_config",
            remedy="import a LLaVA with such a language model",
        )
    format, sizes = _TEXTS[kind]
    section: DecoderConfig = format.config_from_hf({**sizes, **hf}, where="config.json, text_config")
    return section


def _text_format(config: DecoderConfig) -> Format:
    format = next((format for format, _ in _TEXTS.values() if config.name in format.models), None)
    if format is None:
        raise ConfigError(
            f"expected a LLaVA with the language model {' or '.join(_TEXTS)}, got {config.name}",
            where="model.text_model.name",
            remedy="export another model; the converter does not support this one",
        )
    return format


def _section(hf: Mapping[str, Any]) -> dict[str, Any]:
    layer = hf.get("vision_feature_layer", -2)
    if not isinstance(layer, int):
        raise ConfigError(
            f"expected features of a single layer, got several: {layer}",
            where="config.json, vision_feature_layer",
            remedy="import a model that uses the features of one layer",
        )
    vision = _CLIP.config_from_hf(hf.get("vision_config") or {}, where="config.json, vision_config")
    text = _text_from_hf(hf.get("text_config") or {})
    mode = hf.get("vision_feature_select_strategy", "default")
    projector = {
        "input_unit": vision.hidden_size,
        "layers_units": [text.hidden_size] * 2,
        "layers_activation": [function(hf, "projector_hidden_act", "gelu"), None],
        "use_bias": hf.get("multimodal_projector_bias", True),
    }
    return {
        "image_model": vision,
        "text_model": text,
        "projector": {"image_model": projector},
        "image_feature_select_layer_idx": layer,
        "image_feature_select_mode": "patch" if mode == "default" else "cls_patch",
        "initializer": None,  # the sections of the parts have initializers
    }


def _config(config: MultimodalSection) -> dict[str, Any]:
    tower, projection = config.towers[0], config.projection
    activation = None if projection is None else projection.layers[0][1]
    return {
        "vision_config": _CLIP.config_to_hf(tower.encoder),
        "text_config": _text_format(config.text_model).config_to_hf(config.text_model),
        "vision_feature_layer": tower.num_blocks - tower.encoder.num_hidden_layers - 1,
        "vision_feature_select_strategy": "default" if config.features == "patch" else "full",
        "image_seq_length": config.num_features,
        "projector_hidden_act": their_function(activation or "gelu"),
        "multimodal_projector_bias": projection is None or projection.use_bias,
        "tie_word_embeddings": config.share_embedding_weights,
    }


def _meaning(config: MultimodalSection) -> dict[str, Any]:
    (tower, *more), projection = config.towers, config.projection
    text, image = _text_format(config.text_model).meaning(config.text_model), encoder_meaning(tower.encoder)
    return {
        "image_models": 1 + len(more),
        "projection_layer": tower.projection,
        "image_feature_select_layer_idx": tower.num_blocks,
        "image_feature_select_mode": config.features,
        "projector": projection and [layer[:2] for layer in projection.layers],
        "projector.use_bias": projection and projection.use_bias,
        **{f"image_model.{key}": value for key, value in image.items()},
        **{f"text_model.{key}": value for key, value in text.items()},
    }


def _rules(config: MultimodalSection) -> tuple[Rule, ...]:
    tower = "image_model.image_model_list.0.encoder."
    return (
        *(_prefixed(rule, tower, "vision_tower.") for rule in _clip_rules(config.towers[0].encoder)),
        *both(same, "projector.layers.0", "multi_modal_projector.linear_1"),
        *both(same, "projector.layers.1", "multi_modal_projector.linear_2"),
        *(
            _prefixed(rule, "text_model.", "language_model.")
            for rule in _text_format(config.text_model).rules(config.text_model)
        ),
    )


def _prefixed(rule: Rule, ours: str, theirs: str) -> Rule:
    """Return `rule`, which is for a part of a model, with a prefix added to each name."""
    names = tuple(f"{theirs}{name}" for name in rule.theirs)
    return dataclasses.replace(rule, ours=f"{ours}{rule.ours}", theirs=names)


LLAVA = Format(
    model_type="llava",
    architecture="LlavaForConditionalGeneration",
    models=("llava", "multimodal_simple"),
    schema=LlavaConfig,
    meaning=_meaning,
    keys={"image_token_id": Key("image_token_index", 32000)},
    section=_section,
    config=_config,
    rules=_rules,
    prefix="language_model.",
    others=("vision_tower.", "multi_modal_projector."),
    head="language_model.lm_head",
    ignored=("embeddings.position_ids", ".rotary_emb.inv_freq"),
)
