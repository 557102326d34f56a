"""The vision transformer (ViT) and DINOv2, each with its classifier."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from headwater.config.models.vision import ImageEncoderSection, ViTConfig
from headwater.convert.formats.base import Format, Key, function, their_function
from headwater.convert.rules import Rule, both, same, stacked

_KEYS = {
    "hidden_size": Key("hidden_size", 768),
    "num_hidden_layers": Key("num_hidden_layers", 12),
    "num_heads": Key("num_attention_heads", 12),
    "num_channels": Key("num_channels", 3),
    "dropout_rate": Key("hidden_dropout_prob", 0.0),
    "attention_dropout_rate": Key("attention_probs_dropout_prob", 0.0, "attention_dropout"),
    "use_projection_bias_in_attention": Key("qkv_bias", True),
}


def reshaped(ours: str, theirs: str, shape: Sequence[int]) -> Rule:
    """Return a rule for a matrix of ours that the other format stores as `[rows, *shape]`."""

    def join(tensors: Sequence[Tensor]) -> Tensor:
        (tensor,) = tensors
        return tensor.flatten(1)

    return Rule(ours, (theirs,), lambda tensor: [tensor.unflatten(1, tuple(shape))], join)


def _vector(ours: str, theirs: str) -> Rule:
    """Return a rule for a vector that the other format stores as [1, 1, width]."""
    return Rule(
        ours, (theirs,), lambda tensor: [tensor[None, None]], lambda tensors: tensors[0].squeeze(0).squeeze(0)
    )


def _positions(ours: str, theirs: str) -> Rule:
    """Return a rule for a matrix that the other format stores as [1, positions, width]."""
    return Rule(ours, (theirs,), lambda tensor: [tensor[None]], lambda tensors: tensors[0].squeeze(0))


def _rules(config: ViTConfig, base: str, layer: Mapping[str, str]) -> tuple[Rule, ...]:
    """Return the rules of a model.

    Args:
        config: the model section.
        base: prefix of their names of the model without its classifier.
        layer: their names of the modules of a block, by our names.
    """
    there, embeddings = f"{base}.encoder.layer.{{}}", f"{base}.embeddings"
    patches = f"{embeddings}.patch_embeddings.projection"
    return (
        reshaped("vit_model.patches.weight", f"{patches}.weight", (config.num_channels, *config.patch_size)),
        same("vit_model.patches.bias", f"{patches}.bias"),
        _vector("vit_model.class_token.weight", f"{embeddings}.cls_token"),
        _positions("vit_model.positions.weight", f"{embeddings}.position_embeddings"),
        *both(
            stacked,
            "vit_model.blocks.{}.attention.qkv",
            [f"{there}.attention.attention.{name}" for name in ("query", "key", "value")],
            (config.hidden_size,) * 3,
        ),
        *(
            rule
            for ours, theirs in layer.items()
            for rule in both(same, f"vit_model.blocks.{{}}.{ours}", f"{there}.{theirs}")
        ),
        same("vit_model.blocks.{}.attention_scale.weight", f"{there}.layer_scale1.lambda1"),
        same("vit_model.blocks.{}.ffn_scale.weight", f"{there}.layer_scale2.lambda1"),
        *both(same, "vit_model.norm", f"{base}.layernorm"),
        *both(same, "classifier", "classifier"),
    )


_VIT_LAYER = {
    "attention.output": "attention.output.dense",
    "attention_norm": "layernorm_before",
    "ffn.input": "intermediate.dense",
    "ffn.output": "output.dense",
    "ffn_norm": "layernorm_after",
}
_DINOV2_LAYER = {
    "attention.output": "attention.output.dense",
    "attention_norm": "norm1",
    "ffn.input": "mlp.fc1",
    "ffn.output": "mlp.fc2",
    "ffn_norm": "norm2",
}


def both_sizes(value: Any) -> list[int]:
    """Return [height, width] for a size in a `config.json`. One number stands for both."""
    return list(value) if isinstance(value, list | tuple) else [value, value]


def _section(hf: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "nonlinearity": function(hf, "hidden_act", "gelu"),
        "embedding_dropout_rate": hf.get("hidden_dropout_prob", 0.0),
        "image_size": both_sizes(hf.get("image_size", 224)),
        "patch_size": both_sizes(hf.get("patch_size", 16)),
        "num_classes": len(hf.get("id2label") or (0, 1)),
    }


def _config(config: ViTConfig) -> dict[str, Any]:
    classes = range(config.num_classes)
    return {
        "hidden_act": their_function(config.nonlinearity),
        "image_size": list(config.image_size),
        "patch_size": list(config.patch_size),
        "id2label": {str(number): f"LABEL_{number}" for number in classes},
        "label2id": {f"LABEL_{number}": number for number in classes},
    }


def encoder_meaning(config: ImageEncoderSection) -> dict[str, Any]:
    """Return the settings that decide an image encoder's function and the names of its weights, by key."""
    keys = (
        "image_size", "patch_size", "num_channels", "use_embed_proj_bias", "prepend_cls_token",
        "position_embedding_type", "use_post_embed_layer_norm", "hidden_size", "num_hidden_layers",
        "num_heads", "filter_size", "nonlinearity", "norm_first", "layer_norm_epsilon", "attention_type",
        "use_projection_bias_in_attention", "use_ffn_bias_in_attention", "use_ffn_bias",
    )  # fmt: skip
    # Only the presence of the factors matters for trained weights, not their initial value.
    scaled = None if config.layerscale_value is None else "a number"
    return {key: getattr(config, key) for key in keys} | {"layerscale_value": scaled}


def _meaning(config: ViTConfig) -> dict[str, Any]:
    keys = ("num_classes", "use_encoder_pooler_layer", "use_dinov2_classifier", "use_bias_in_output")
    return encoder_meaning(config) | {key: getattr(config, key) for key in keys}


VIT = Format(
    model_type="vit",
    architecture="ViTForImageClassification",
    models=("vision_transformer",),
    schema=ViTConfig,
    meaning=_meaning,
    keys={
        **_KEYS,
        "filter_size": Key("intermediate_size", 3072),
        "layer_norm_epsilon": Key("layer_norm_eps", 1e-12),
    },
    section=_section,
    config=_config,
    rules=lambda config: _rules(config, "vit", _VIT_LAYER),
    prefix="vit.",
    others=("classifier.",),
    head="classifier",
    ignored=("embeddings.mask_token", "pooler.dense.weight", "pooler.dense.bias"),
)


def _dinov2_section(hf: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_section(hf),
        "filter_size": int(hf.get("hidden_size", 768) * hf.get("mlp_ratio", 4)),
        "use_dinov2_classifier": True,
    }


def _dinov2_config(config: ViTConfig) -> dict[str, Any]:
    ratio = config.filter_size / config.hidden_size
    # The library truncates ratio * hidden_size to an integer, so that the ratio must not be rounded down.
    ratio = int(ratio) if ratio.is_integer() else math.nextafter(ratio, math.inf)
    return {
        **_config(config),
        "mlp_ratio": ratio,
        "layerscale_value": 1.0 if config.layerscale_value is None else config.layerscale_value,
        "use_mask_token": False,
        "use_swiglu_ffn": False,
    }


DINOV2 = Format(
    model_type="dinov2",
    architecture="Dinov2ForImageClassification",
    models=("vision_transformer",),
    schema=ViTConfig,
    meaning=_meaning,
    keys={
        **_KEYS,
        "layer_norm_epsilon": Key("layer_norm_eps", 1e-6),
        "layerscale_value": Key("layerscale_value", 1.0),
    },
    section=_dinov2_section,
    config=_dinov2_config,
    refused={"use_swiglu_ffn": False, "drop_path_rate": 0.0},
    rules=lambda config: _rules(config, "dinov2", _DINOV2_LAYER),
    prefix="dinov2.",
    others=("classifier.",),
    head="classifier",
    ignored=("embeddings.mask_token",),
)
