"""Base of the formats: the `config.json` and the tensor names of a model class of the transformers library.

"Ours" are the keys and names of this package, "theirs" those of the transformers library.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from headwater.config.models.decoder import DecoderConfig
from headwater.convert.rules import TRAIN_UNCONVERTED, Rule
from headwater.core.errors import ConfigError

REQUIRED = object()
"""Value of `Key.default` for a key that a `config.json` must have."""


@dataclasses.dataclass(frozen=True)
class Key:
    """A key of `config.json`.

    Attributes:
        name: name of the key.
        default: value if the key is missing; `REQUIRED`: the key must not be missing.
        value: attribute of the model section that is exported; by default the section's key.
    """

    name: str
    default: Any = REQUIRED
    value: str | None = None


@dataclasses.dataclass(frozen=True)
class Format:
    """The storage format of one model class of the transformers library.

    Attributes:
        model_type: `model_type` in `config.json`.
        architecture: name of the class, with its head.
        models: names of our models in this format; an import uses the first. Empty for a part of a model.
        keys: keys with the same meaning on both sides, by their key in the model section.
        rules: returns the rules of the tensors of a model.
        section: returns further keys of the model section for a `config.json`.
        config: returns further keys of `config.json` for a model section.
        schema: class of the model section.
        meaning: returns the settings that decide the model's function and the names of its weights, by key of
            the section.
        refused: keys of `config.json`, each with the only value that can be imported.
        prefix: prefix of the tensors of the model without its head; checkpoints without a head omit it.
        others: prefixes of further tensors.
        head: name of the head; some checkpoints also store its weight if it is shared with the embedding.
        ignored: suffixes of tensors that hold no weights.
        folders: names of the folders of a model that is stored in several. They are prefixes of the tensors'
            names, and keys under which the contents of the `config.json` files are merged.
        elsewhere: keys of the model section that the weights of another converter can express, with the name
            of the converter.
    """

    model_type: str
    architecture: str
    models: tuple[str, ...]
    keys: Mapping[str, Key]
    rules: Callable[[Any], Sequence[Rule]]
    section: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda hf: {}
    config: Callable[[Any], Mapping[str, Any]] = lambda config: {}
    schema: type[Any] = DecoderConfig
    meaning: Callable[[Any], dict[str, Any]] = lambda config: decoder_meaning(config)
    refused: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    prefix: str = "transformer."
    others: tuple[str, ...] = ()
    head: str = "lm_head"
    ignored: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    elsewhere: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def has_initializer(self) -> bool:
        """True if the model section has the key `initializer`; in other models, sections of parts have it."""
        return "initializer" in self.schema.model_fields

    def by_folder(self, hf: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """Return folder -> content of its `config.json`; folders are relative to the model's folder."""
        return {name: hf[name] for name in self.folders} or {"": hf}

    def config_from_hf(self, hf: Mapping[str, Any], *, where: str) -> Any:
        """Return the model section for the content of a `config.json`.

        Args:
            hf: content of `config.json`.
            where: path of the file, for error messages.

        Raises:
            ConfigError: if a value is missing or wrong, or our models cannot express it.
        """
        for name, only in self.refused.items():
            if hf.get(name) not in (None, only):
                raise ConfigError(
                    f"expected {name} to be {only!r}, got {hf[name]!r}",
                    where=where,
                    remedy=TRAIN_UNCONVERTED,
                )
        check_sizes(hf, where=where)
        section: dict[str, Any] = {"name": self.models[0] if self.models else None}
        for ours, key in self.keys.items():
            value = hf.get(key.name, key.default)
            if value is REQUIRED or (value is None and key.default is REQUIRED):
                raise ConfigError(f"{key.name} is missing", where=where, remedy="copy the file again")
            section[ours] = value
        if self.has_initializer:
            section["initializer"] = {"name": "normal", "std": hf.get("initializer_range", 0.02)}
        try:
            section |= self.section(hf)
            return self.schema.model_validate({key: v for key, v in section.items() if v is not None})
        except ValidationError as error:
            details = error.errors()[0]
            here = str(details["loc"][0]) if details["loc"] else "config"
            there = self.keys[here].name if here in self.keys else here
            raise ConfigError(
                f"{there}: {details['msg']}", where=where, remedy="correct the value"
            ) from error

    def config_to_hf(self, config: Any, *, end_of_text: int | None = None) -> dict[str, Any]:
        """Return the content of `config.json` for a model section.

        Args:
            config: the model section.
            end_of_text: id of the end-of-text token, if there is one.

        Raises:
            ConfigError: if the format cannot express the model.
        """
        hf: dict[str, Any] = {key.name: getattr(config, key.value or ours) for ours, key in self.keys.items()}
        if self.has_initializer:
            hf["initializer_range"] = config.matrix_init.std
        hf |= {
            "bos_token_id": end_of_text,
            "eos_token_id": end_of_text,
            "architectures": [self.architecture],
            "model_type": self.model_type,
            **self.config(config),
        }
        # A setting that the format cannot express has another value when the result is imported again.
        back, given = (self.meaning(each) for each in (self.config_from_hf(hf, where="the export"), config))
        for key, value in given.items():
            if not _equal(value, back[key]):
                other = self.elsewhere.get(key)
                raise ConfigError(
                    f"the format of {self.architecture} cannot express {key}: {value}",
                    where=f"model.{key}",
                    remedy=f"convert it with --model {other}, which multiplies the factor into the weights"
                    if other
                    else f"export a model with {key}: {back[key]}",
                )
        return hf


_LARGEST = {"layer": 10_000, "expert": 100_000, "": 1 << 40}
"""Word -> maximum value of a key whose name contains this word; far above the values of real models."""


def check_sizes(hf: Mapping[str, Any], *, where: str) -> None:
    """Raise if a number is absurdly large: a model of that size must not be built, even on the meta device.

    Raises:
        ConfigError: if a number is above its limit.
    """
    for key, value in hf.items():
        if not isinstance(value, int | float) or not isinstance(key, str):
            continue
        # The empty word is the last, because every key contains it.
        largest = next(limit for word, limit in _LARGEST.items() if word in key)
        # Not `abs(value) > largest`: NaN must be refused too.
        if not -largest <= value <= largest:
            raise ConfigError(
                f"expected {key} of at most {largest}, got {value:.6g}",
                where=where,
                remedy="correct the value",
            )


_HEADS = (
    "ForCausalLM", "LMHeadModel", "ForPreTraining", "ForMaskedLM", "ForSequenceClassification",
    "ForTokenClassification", "ForQuestionAnswering", "ForImageClassification",
)  # fmt: skip
"""Suffixes of the names of classes with a head."""


def headless(format: Format) -> Format:
    """Return the format of a model class without its head, whose tensor names have no prefix.

    An import gives the head random initial values, the same as in a run without a checkpoint.
    """
    heads = (f"{format.head}.", *format.others)

    def without_head(rule: Rule) -> Rule:
        if rule.theirs and rule.theirs[0].startswith(heads):
            return Rule(rule.ours, (), split=lambda tensor: ())
        below = tuple(name.removeprefix(format.prefix) for name in rule.theirs)
        return dataclasses.replace(rule, theirs=below)

    return dataclasses.replace(
        format,
        architecture=re.sub(f"({'|'.join(_HEADS)})$", "Model", format.architecture),
        rules=lambda config: [without_head(rule) for rule in format.rules(config)],
        prefix="",
        ignored=(*format.ignored, "pooler.dense.weight", "pooler.dense.bias"),
    )


def decoder_meaning(config: DecoderConfig) -> dict[str, Any]:
    """Return the settings that decide the model's function and the names of its weights, by key."""
    layers = range(config.num_hidden_layers)
    meaning = {
        key: getattr(config, key)
        for key in (
            "vocab_size", "hidden_size", "num_hidden_layers", "num_heads", "position_embedding_type",
            "share_embedding_weights", "embedding_layer_norm", "norm_type", "norm_unit_offset",
            "layer_norm_epsilon", "norm_first_sandwich", "parallel_blocks", "attention_logit_softcapping",
            "attention_sink_tokens", "use_projection_bias_in_attention", "use_ffn_bias_in_attention",
            "nonlinearity", "use_ffn_bias", "use_bias_in_output", "final_logit_softcapping",
            "embeddings_scale", "alibi_trainable_slopes",
        )
    }  # fmt: skip
    moe = config.moe
    meaning |= {
        "attention_inner_dim": config.inner_size,
        "extra_attention_params.num_kv_groups": config.num_kv_heads,
        "attention_type": [config.attention_scale(layer) for layer in layers],
        "attention_sliding_window_length": [config.window(layer) for layer in layers],
        "filter_size": config.ffn_size,
        "output_logits_scale": config.logits_scale,
        "moe": moe and (moe.num_experts, moe.top_k, moe.num_shared_experts, moe.null_expert_bias),
    }
    if config.parallel_blocks:
        meaning["use_untied_layer_norm"] = config.use_untied_layer_norm
    if config.position_embedding_type == "rotary":
        keys = (
            "rotary_style",
            "rope_theta",
            "pos_scaling_type",
            "pos_scaling_factor",
            "pos_scaling_extra_args",
        )
        meaning |= {"rotary_dim": config.rotary_size, **{key: getattr(config, key) for key in keys}}
    if config.position_embedding_type == "learned":
        meaning["max_position_embeddings"] = config.max_position_embeddings
    return meaning


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, list):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, float) and isinstance(b, float | int):
        return math.isclose(a, b, rel_tol=1e-6)
    return bool(a == b)


# Parts of sections and configs that several formats share.

_FUNCTIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_new",
    "gelu_pytorch_tanh": "gelu_new",
    "gelu_fast": "gelu_new",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "squared_relu",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}
"""Our name of each nonlinearity, by the library's name."""

_GATED = {
    "silu": "swiglu",
    "gelu": "geglu",
    "gelu_pytorch_tanh": "geglu_new",
    "gelu_new": "geglu_new",
    "relu": "reglu",
}
"""Our name of each gated nonlinearity, by the library's name of the gate's function."""


def function(hf: Mapping[str, Any], key: str, default: str, *, gated: bool = False) -> str:
    """Return our name of the nonlinearity at `key` of `config.json`; unknown names are not changed."""
    name: str = hf.get(key, default)
    return (_GATED if gated else _FUNCTIONS).get(name, name)


def their_function(nonlinearity: str, *, gated: bool = False) -> str:
    """Return the transformers library's name of a nonlinearity.

    If the library does not have it, return the name of another one: `Format.config_to_hf` then finds the
    difference and raises an error.
    """
    names = _GATED if gated else _FUNCTIONS
    theirs = (there for there, here in names.items() if here == nonlinearity)
    return next(theirs, next(iter(names)))


def grouped(num_kv_heads: int | None, num_heads: int) -> dict[str, Any]:
    """Return the keys of the model section for the number of heads of keys and values."""
    if num_kv_heads in (None, num_heads):
        return {"attention_module": "aiayn_attention"}
    return {
        "attention_module": "multiquery_attention",
        "extra_attention_params": {"num_kv_groups": num_kv_heads},
    }


_SCALINGS = ("linear", "yarn", "llama3")
"""Kinds of rotary scaling that have the same name in `config.json` and in a params file."""


def rotary(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of the model section for the rotary positions of a `config.json`.

    It reads the format of transformers 5 and the older one.

    Raises:
        ConfigError: if the kind of scaling is not supported.
    """
    old = {"rope_theta": hf.get("rope_theta", 10000.0), **(hf.get("rope_scaling") or {})}
    rope = hf.get("rope_parameters") or old
    kind = rope.get("rope_type", rope.get("type", "default"))
    section = {"position_embedding_type": "rotary", "rope_theta": float(rope.get("rope_theta", 10000.0))}
    if kind == "default":
        return section
    if kind not in _SCALINGS:
        raise ConfigError(
            f"the kind of rotary scaling {kind!r} is not supported",
            where="config.json, rope_parameters",
            remedy=f"import a model without scaling, or with one of {', '.join(_SCALINGS)}",
        )
    extra = (
        "original_max_position_embeddings", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow",
        "attention_factor",
    )  # fmt: skip
    floats = {key: float(rope[key]) for key in extra[1:] if rope.get(key) is not None}
    if rope.get(extra[0]) is not None:
        floats[extra[0]] = rope[extra[0]]
    return section | {
        "pos_scaling_type": kind,
        "pos_scaling_factor": float(rope["factor"]),
        "pos_scaling_extra_args": floats,
    }


def rope_parameters(config: DecoderConfig) -> dict[str, Any]:
    """Return the rotary positions in the format of transformers 5, as keys of `config.json`."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.pos_scaling_type in _SCALINGS:
        rope |= {"rope_type": config.pos_scaling_type, "factor": config.pos_scaling_factor}
        rope |= config.pos_scaling_extra_args.model_dump(exclude_none=True)
    return {"rope_parameters": rope}


def interleaved_heads(config: DecoderConfig) -> Tensor:
    """Return the order of rows in formats that interleave the heads of queries, keys and values.

    Their rows come in groups: the query heads that share a key head, then this key head, then its value head.
        In our rows all queries come first, then all keys, then all values.

    Returns:
        For each row of theirs, the index of our row.
    """
    head, groups = config.head_size, config.num_kv_heads
    query = torch.arange(config.inner_size).view(groups, -1, head)
    key = config.inner_size + torch.arange(groups * head).view(groups, 1, head)
    return torch.cat((query, key, key + groups * head), dim=1).flatten()


def qkv_rows(config: DecoderConfig) -> tuple[int, int, int]:
    """Return the numbers of rows of queries, of keys and of values in the matrix that stacks them."""
    kv_size = config.num_kv_heads * config.head_size
    return config.inner_size, kv_size, kv_size
