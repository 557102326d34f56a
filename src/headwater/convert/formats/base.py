"""What a format of Hugging Face's is: its config, its names, and how both are read and written."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from headwater.config.models import DecoderConfig
from headwater.convert.rules import Rule
from headwater.core.errors import ConfigError

REQUIRED = object()
"""Default of a key that must be there."""


@dataclasses.dataclass(frozen=True)
class Key:
    """A value of `config.json`.

    Attributes:
        name: its key there.
        default: what it means where it is left out; without one it must be there.
        value: attribute of the model section with the value in force; the section's key if not given.
    """

    name: str
    default: Any = REQUIRED
    value: str | None = None


@dataclasses.dataclass(frozen=True)
class Format:
    """How one model class of the transformers library is stored.

    Attributes:
        model_type: `model_type` in `config.json`.
        architecture: the class with the language-model head.
        models: names of the models here that are stored so; an imported one gets the first. None of a part.
        keys: values that mean the same on both sides, by their key in the model section.
        rules: the tensors of a model.
        section: what else the model section says for a `config.json`.
        config: what else `config.json` says for a model section.
        schema: of the model section.
        meaning: what decides about a model's function and the names of its weights, by key of the section.
        refused: keys of `config.json` with the only value that can be imported.
        prefix: of the tensors of the model without its head: checkpoints of that alone leave it out.
        others: what names of further tensors begin with.
        head: name of the head's weight, which is stored again in some checkpoints where it is shared.
        ignored: what the names of tensors that hold no weight end in.
        folders: where the model lies in several: their names, with which the names of their tensors begin,
            and under which the content of each one's `config.json` is here.
        elsewhere: keys of the model section that the weights of another converter express, with its name.
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
        """Whether the model section says how matrices begin; where it does not, its parts do."""
        return "initializer" in self.schema.model_fields

    def by_folder(self, hf: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """The content of each `config.json`, by the folder below the model's that it lies in."""
        return {name: hf[name] for name in self.folders} or {"": hf}

    def config_from_hf(self, hf: Mapping[str, Any], *, where: str) -> Any:
        """The model section for the content of a `config.json`.

        Raises:
            ConfigError: if the models here cannot express it.
        """
        for name, only in self.refused.items():
            if hf.get(name) not in (None, only):
                raise ConfigError(
                    f"{name} is {hf[name]!r}, and only {only!r} can be imported",
                    where=where,
                    remedy="import another model",
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
        """Content of `config.json` for a model section.

        Args:
            config: the model section.
            end_of_text: token that ends a text, if there is one.

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
        # What the format cannot say comes back otherwise.
        back, given = (self.meaning(each) for each in (self.config_from_hf(hf, where="the export"), config))
        for key, value in given.items():
            if not _equal(value, back[key]):
                other = self.elsewhere.get(key)
                raise ConfigError(
                    f"the format of {self.architecture} has no models with {key} = {value}",
                    where=f"model.{key}",
                    remedy=f"convert it with --model {other}, whose weights absorb the factor"
                    if other
                    else f"only a model with {key} = {back[key]} can be exported",
                )
        return hf


_LARGEST = {"layer": 10_000, "expert": 100_000, "": 1 << 40}
"""The largest number that a key may have whose name contains the word; no model comes near it."""


def check_sizes(hf: Mapping[str, Any], *, where: str) -> None:
    """Raise a ConfigError for a number that no model has, before a model of that size is outlined."""
    for key, value in hf.items():
        if not isinstance(value, int | float) or not isinstance(key, str):
            continue
        largest = next(limit for word, limit in _LARGEST.items() if word in key)
        if not -largest <= value <= largest:
            raise ConfigError(
                f"{key} is {value:.6g}, and at most {largest} can be imported",
                where=where,
                remedy="correct the value",
            )


_HEADS = (
    "ForCausalLM", "LMHeadModel", "ForPreTraining", "ForMaskedLM", "ForSequenceClassification",
    "ForTokenClassification", "ForQuestionAnswering", "ForImageClassification",
)  # fmt: skip
"""What the names of classes with a head end in."""


def headless(format: Format) -> Format:
    """The same model without its head: the class below it, whose tensors have no prefix.

    An import draws the head's weights as a run would that begins with none.
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
    """What decides about the model's function and the names of its weights, by key of the model section."""
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


# Parts of sections and configs that several formats have in common.

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
"""Names of functions there, and what they are called here."""

_GATED = {
    "silu": "swiglu",
    "gelu": "geglu",
    "gelu_pytorch_tanh": "geglu_new",
    "gelu_new": "geglu_new",
    "relu": "reglu",
}
"""Names there of functions that gate, and what the whole is called here."""


def function(hf: Mapping[str, Any], key: str, default: str, *, gated: bool = False) -> str:
    """The nonlinearity that `config.json` names under `key`; as it is there if it is not known here."""
    name: str = hf.get(key, default)
    return (_GATED if gated else _FUNCTIONS).get(name, name)


def their_function(nonlinearity: str, *, gated: bool = False) -> str:
    """What a nonlinearity is called in `config.json`; some other one where it has no name there."""
    names = _GATED if gated else _FUNCTIONS
    theirs = (there for there, here in names.items() if here == nonlinearity)
    return next(theirs, next(iter(names)))


def grouped(num_kv_heads: int | None, num_heads: int) -> dict[str, Any]:
    """Keys of the model section that say how many heads share keys and values."""
    if num_kv_heads in (None, num_heads):
        return {"attention_module": "aiayn_attention"}
    return {
        "attention_module": "multiquery_attention",
        "extra_attention_params": {"num_kv_groups": num_kv_heads},
    }


_SCALINGS = ("linear", "yarn", "llama3")
"""Ways of scaling rotary positions that have the same name there."""


def rotary(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Base and scaling of rotary positions, in the form of transformers 5 or an older one.

    Raises:
        ConfigError: if the scaling is of a kind that there is not here.
    """
    old = {"rope_theta": hf.get("rope_theta", 10000.0), **(hf.get("rope_scaling") or {})}
    rope = hf.get("rope_parameters") or old
    kind = rope.get("rope_type", rope.get("type", "default"))
    section = {"position_embedding_type": "rotary", "rope_theta": float(rope.get("rope_theta", 10000.0))}
    if kind == "default":
        return section
    if kind not in _SCALINGS:
        raise ConfigError(
            f"rotary positions are scaled by {kind!r}",
            where="config.json, rope_parameters",
            remedy=f"import a model with one of {', '.join(_SCALINGS)}, or none",
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
    """Base and scaling of rotary positions as `config.json` of transformers 5 has them."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.pos_scaling_type in _SCALINGS:
        rope |= {"rope_type": config.pos_scaling_type, "factor": config.pos_scaling_factor}
        rope |= config.pos_scaling_extra_args.model_dump(exclude_none=True)
    return {"rope_parameters": rope}


def interleaved_heads(config: DecoderConfig) -> Tensor:
    """Order of rows where each key head follows the query heads that share it, and its value head follows.

    Returns:
        For each row there the row here, where all queries come first, then all keys, then all values.
    """
    head, groups = config.head_size, config.num_kv_heads
    query = torch.arange(config.inner_size).view(groups, -1, head)
    key = config.inner_size + torch.arange(groups * head).view(groups, 1, head)
    return torch.cat((query, key, key + groups * head), dim=1).flatten()


def qkv_rows(config: DecoderConfig) -> tuple[int, int, int]:
    """Rows of query, key and value."""
    kv_size = config.num_kv_heads * config.head_size
    return config.inner_size, kv_size, kv_size
