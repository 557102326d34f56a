"""Tiny configurations: counts and sizes are reduced by rules on the names of attributes."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedConfig

VOCABULARY = 128
"""Tokens of the vocabulary; the last few have a special meaning."""

_SPECIAL = 32
"""Ids at the end of the vocabulary for special tokens with larger ids."""

_NUM_HEADS = 4
_HEAD_DIM = 16
_ALL_LAYERS = 1000


@dataclasses.dataclass(frozen=True)
class Scale:
    """The size of a tiny configuration.

    Attributes:
        divisor: divides widths; without it all widths of a kind, in all parts of the model, become the same
            small number, and so do the heads.
        image: approximate limit of the side of images in pixels.
        layers: limit of the layers of each stack; unlimited if not given.
    """

    divisor: int | None
    image: int = 32
    layers: int | None = 3


_SAME = {
    r"(^|_)(num|n)?_?(key_value|kv)_heads$": 2,
    r"(^|_)((num|n)_)?(attention_|attn_)?heads?$": _NUM_HEADS,
    r"(^|_)(head_dim|d_kv|d_head|dim_head|attention_head_size)$": _HEAD_DIM,
    r"(intermediate|ffn|mlp|feed_?forward)(_hidden)?_(size|dim)$|^(d_ff|d_inner|n_inner|ffn_hidden_size)$"
    r"|^dim_(ff|feedforward)$": 128,
    r"rank$": 16,
    r"^upsample_groups$": 64,
    r"(hidden|embed|embedding|projection|proj|latent|emb|fusion|projector)_(size|dim)$|_dim$"
    r"|^(d_model|n_embd|dim|width|projection_size|embedding_size|output_dim)$": 64,
}
"""Patterns of names of widths, and the width without a divisor; the first pattern that matches applies."""

_WIDTH = re.compile(
    r"(hidden|embed|embedding|inner|intermediate|ffn|mlp|feature|codebook|codevector|proj|projection"
    r"|projector|bottleneck|output|adapter)s?(_hidden)?_(size|dim)s?($|_)|(dim|channel|rank|filter)s?$"
    r"|^d_(model|ff|kv|inner|head)$|^(n_embd|n_inner|dff|width)$|channel_list$"
)
_NO_WIDTH = re.compile(r"^(in|num|n|input)_channels$|vocab|positional|^num_|context_dim|rope")

_LAYERS = re.compile(r"(^|_)(layers?|blocks?|depths?)$|^n_layers?$|^stage_num_blocks$")

_MOST = {
    r"(^|_)experts$|expert_num": 8,
    r"(experts_per_tok(en)?|moe_topk|moe_k|top_k_experts)$": 2,
    r"^n_group$": 2,
    r"^topk_group$": 1,
    r"vocab": VOCABULARY,
    r"^(num_queries|num_query_tokens|two_stage_num_proposals|query_length)$": 10,
    r"max_.*position(_embedding)?s$|^n_positions$|^n_ctx$|max_seq_len": 512,
    r"train_num_points": 64,
    r"num_mel_bins": 16,
    r"^mask_(time|feature)_length$": 2,
}
"""Patterns of names of counts, and the limit of each."""

_FILLED = {
    "pad_token_id": 0,
    "num_key_value_heads": 2,
    "head_dim": _HEAD_DIM,
    "vocab_size": VOCABULARY,
    "num_experts_per_tok": 2,
    "n_routed_experts": 8,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "prediction_length": 4,
}
"""Attributes that some configurations do not set, but their models need."""

_PER_LAYER = re.compile(r"(layer|block|indexer)_types$|^layers_block_type$|^no_rope_layers$")
_TOKEN = re.compile(r"token(_id|_index)?s?$")


def tiny(config: PreTrainedConfig, scale: Scale, overrides: Mapping[str, Any]) -> PreTrainedConfig:
    """Return a small copy of `config`; `overrides` are attributes by dotted path that replace the rules."""
    return _Shrink(config, scale, {}).built(overrides)


class _Shrink:
    """The reduction of one configuration and of nested ones.

    Attributes:
        now: the attributes of the configuration.
        tokens: special tokens beyond the vocabulary, and their new ids; the same in the whole model.
        layers: number of layers to keep of a stack.
        staged: True for a pyramid, whose widths grow from stage to stage.
    """

    def __init__(self, config: PreTrainedConfig, scale: Scale, tokens: dict[int, int]) -> None:
        self.kind = type(config)
        self.now = vars(config)
        self.scale = scale
        self.tokens = tokens
        self.layers = _enough_layers(self.now.get("layer_types"), scale.layers or _ALL_LAYERS)
        self.staged = any(
            isinstance(self.now.get(name), (list, tuple)) for name in ("depths", "hidden_sizes")
        )

    def built(self, overrides: Mapping[str, Any]) -> PreTrainedConfig:
        """Return the configuration, built from the arguments of its class, which computes the rest."""
        values: dict[str, Any] = {}
        for field in dataclasses.fields(self.kind):
            stored = self.kind.attribute_map.get(field.name, field.name)
            if not field.init or field.name.startswith("_") or stored not in self.now:
                continue
            value = self.now[stored]
            if isinstance(value, PreTrainedConfig):
                inner = _Shrink(value, self.scale, self.tokens)
                values[field.name] = inner.built(_below(overrides, field.name))
            elif value is None or field.default is not None or not isinstance(value, (int, list, tuple)):
                values[field.name] = self.value(field.name, value)
        if "mrope_section" in getattr(self.kind, "ignore_keys_at_rope_validation", ()):
            values["rope_parameters"] = self.rope()
        values |= {name: value for name, value in overrides.items() if "." not in name}
        small = self.kind(**values)
        features = self.now.get("_out_features")
        if features and "out_features" not in values:
            small = self.kind(**values, out_features=_features(features, small.stage_names))
        return small

    def value(self, name: str, value: Any) -> Any:
        """Return the value of an attribute in the small configuration."""
        if value is None:
            return _FILLED.get(name)
        if name == "use_cache":
            return False
        if name == "num_key_value_heads" and "kv_lora_rank" in self.now:
            return _NUM_HEADS  # in latent attention each head has a key
        if name == "image_size":
            return _image_size(value, self.now.get("patch_size"), self.scale.image)
        if isinstance(value, (list, tuple)):
            return list(
                value[: self.layers] if _PER_LAYER.search(name) else [self.item(name, v) for v in value]
            )
        if self.staged and _LAYERS.search(name):
            return value  # a number of stages
        return self.item(name, value)

    def item(self, name: str, value: Any) -> Any:
        """Return the value of a number, alone or in a list; other values stay."""
        if isinstance(value, (list, tuple)):
            return [self.item(name, inner) for inner in value]
        if isinstance(value, bool) or not isinstance(value, int):
            return value
        if _TOKEN.search(name):
            return self.token(value)
        if _LAYERS.search(name):
            return min(value, self.layers)
        most = next((most for pattern, most in _MOST.items() if re.search(pattern, name)), None)
        return self.width(name, value) if most is None else min(value, most)

    def token(self, value: int) -> int:
        if value < VOCABULARY - _SPECIAL:
            return value
        return self.tokens.setdefault(value, VOCABULARY - 1 - len(self.tokens))

    def width(self, name: str, value: int) -> int:
        if self.scale.divisor is not None:
            is_width = value >= 32 and _WIDTH.search(name) and not _NO_WIDTH.search(name)
            return value // self.scale.divisor if is_width else value
        if self.staged:
            return value
        return min(value, next((same for pattern, same in _SAME.items() if re.search(pattern, name)), value))

    def rope(self) -> dict[str, Any]:
        """Return rotary embeddings in three sections (time, height, width) that share half of a head."""
        rope = dict(self.now.get("rope_parameters") or {})
        half = int(_HEAD_DIM * rope.get("partial_rotary_factor", 1.0)) // 2
        if self.scale.divisor is None and "rope_type" in rope:
            rope["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]
        return rope


def _below(overrides: Mapping[str, Any], name: str) -> dict[str, Any]:
    start = f"{name}."
    return {key.removeprefix(start): value for key, value in overrides.items() if key.startswith(start)}


def _enough_layers(types: Any, least: int) -> int:
    """Return the number of layers to keep, so that every type of layer is among them if a few are enough."""
    if not isinstance(types, (list, tuple)) or not types:
        return least
    last = max(types.index(kind) for kind in set(types))
    return max(least, last + 1) if last < 2 * least else least


def _features(names: Sequence[str], stages: Sequence[str]) -> list[str]:
    """Return the stages of a small backbone: as many as in the large one, and the same ones if they exist."""
    return list(names) if set(names) <= set(stages) else list(stages)[-len(names) :]


def _image_size(size: Any, patch: Any, most: int) -> Any:
    """Return a size of about `most` or less, with whole patches and at least two of them."""
    if isinstance(size, (list, tuple)):
        patches = patch if isinstance(patch, Sequence) else [patch] * len(size)
        return [_image_size(*pair, most) for pair in zip(size, patches, strict=False)]
    patch = patch if isinstance(patch, int) else 1
    return min(size, max(2 * patch, math.ceil(most / patch) * patch)) if isinstance(size, int) else size
