"""The GPT family in the format of Hugging Face's GPT-2 (`GPT2LMHeadModel`), both ways."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from headwater.config.models import GPTConfig
from headwater.convert.rules import IDENTITY, TRANSPOSE, Rule, convert, invert, match_rule
from headwater.convert.shards import (
    INDEX_FILE,
    ShardWriter,
    plan_shards,
    read_tensors,
    weight_index,
)
from headwater.core.errors import CheckpointError, ConfigError
from headwater.models.registry import build_model

CONFIG_FILE = "config.json"

_MODULES = {
    "embedding": ("transformer.wte", IDENTITY),
    "position_embedding": ("transformer.wpe", IDENTITY),
    "blocks.{}.attention_norm": ("transformer.h.{}.ln_1", IDENTITY),
    "blocks.{}.attention.qkv": ("transformer.h.{}.attn.c_attn", TRANSPOSE),
    "blocks.{}.attention.output": ("transformer.h.{}.attn.c_proj", TRANSPOSE),
    "blocks.{}.ffn_norm": ("transformer.h.{}.ln_2", IDENTITY),
    "blocks.{}.ffn.input": ("transformer.h.{}.mlp.c_fc", TRANSPOSE),
    "blocks.{}.ffn.output": ("transformer.h.{}.mlp.c_proj", TRANSPOSE),
    "norm": ("transformer.ln_f", IDENTITY),
    "head": ("lm_head", IDENTITY),
}
"""Module here: module there, and what happens to its weight (their `Conv1D` is a transposed `Linear`)."""

GPT2_RULES = tuple(
    rule
    for ours, (theirs, transform) in _MODULES.items()
    for rule in (
        Rule(f"{ours}.weight", f"{theirs}.weight", transform),
        Rule(f"{ours}.bias", f"{theirs}.bias"),
    )
)
"""From this package's names to Hugging Face's."""

_CONFIG_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_hidden_layers": "n_layer",
    "num_heads": "n_head",
    "filter_size": "n_inner",
    "dropout_rate": "resid_pdrop",
    "embedding_dropout_rate": "embd_pdrop",
    "attention_dropout_rate": "attn_pdrop",
    "layer_norm_epsilon": "layer_norm_epsilon",
    "share_embedding_weights": "tie_word_embeddings",
    "nonlinearity": "activation_function",
}
"""Key of the model section: key of `config.json`, where the value is the same."""

_HF_DEFAULTS: dict[str, Any] = {
    "n_inner": None,
    "activation_function": "gelu_new",
    "resid_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "attn_pdrop": 0.1,
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
}
"""What `config.json` means where it leaves a key out."""

_HF_FUNCTIONS = {"gelu", "gelu_new", "quick_gelu", "relu", "silu", "tanh"}
"""Nonlinearities that have the same name there."""

_SAME_FUNCTION = {"gelu_pytorch_tanh": "gelu_new", "swish": "silu"}


def config_to_hf(config: GPTConfig, *, end_of_text: int | None = None) -> dict[str, Any]:
    """Content of `config.json` for `config`.

    Args:
        config: the model section.
        end_of_text: token that ends a text, if there is one.

    Raises:
        ConfigError: if GPT-2's format cannot express the model.
    """
    required = {
        "use_projection_bias_in_attention": True,
        "use_ffn_bias_in_attention": True,
        "use_ffn_bias": True,
        "use_bias_in_output": False,
        "scale_qk_dot_by_d": False,
        "embeddings_scale": 1.0,
        "output_logits_scale": 1.0,
    }
    for key, value in required.items():
        if getattr(config, key) != value:
            raise ConfigError(
                f"the GPT-2 format has no models with {key} = {getattr(config, key)}",
                where=f"model.{key}",
                remedy=f"only a model with {key} = {value} can be exported",
            )
    if config.nonlinearity not in _HF_FUNCTIONS:
        raise ConfigError(
            f"the GPT-2 format has no models with nonlinearity = {config.nonlinearity}",
            where="model.nonlinearity",
            remedy=f"only a model with one of {', '.join(sorted(_HF_FUNCTIONS))} can be exported",
        )
    hf: dict[str, Any] = {theirs: getattr(config, ours) for ours, theirs in _CONFIG_KEYS.items()}
    hf |= {
        "n_inner": config.ffn_size,
        "embd_pdrop": config.embedding_dropout,
        "attn_pdrop": config.attention_dropout,
        "scale_attn_weights": config.attention_type == "scaled_dot_product",
        "initializer_range": config.initializer.std,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
    }
    return hf


def config_from_hf(hf: Mapping[str, Any], *, where: str) -> GPTConfig:
    """The model section for the content of a `config.json`.

    Raises:
        ConfigError: if it is not a GPT-2, or one that the GPT family here cannot express.
    """
    refused = ("scale_attn_by_inverse_layer_idx", "add_cross_attention")
    for key, wanted in {"model_type": "gpt2", **dict.fromkeys(refused, False)}.items():
        if hf.get(key, False) != wanted:
            raise ConfigError(
                f"{key} is {hf.get(key)!r}, and only {wanted!r} can be imported",
                where=where,
                remedy="import a GPT-2 model",
            )
    filled = {**_HF_DEFAULTS, **hf}
    filled["activation_function"] = _SAME_FUNCTION.get(
        filled["activation_function"], filled["activation_function"]
    )
    section = {ours: filled[theirs] for ours, theirs in _CONFIG_KEYS.items() if theirs in filled}
    section["attention_type"] = "scaled_dot_product" if hf.get("scale_attn_weights", True) else "dot_product"
    section["initializer"] = {"name": "normal", "std": hf.get("initializer_range", 0.02)}
    try:
        return GPTConfig.model_validate(section)
    except ValidationError as error:
        details = error.errors()[0]
        key = str(details["loc"][0]) if details["loc"] else "config"
        raise ConfigError(
            f"{_CONFIG_KEYS.get(key, key)}: {details['msg']}", where=where, remedy="correct the value"
        ) from error


def export_hf(
    source: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    config: GPTConfig,
    out_dir: Path,
    *,
    dtype: torch.dtype = torch.float32,
    max_shard_bytes: int = 5 * 10**9,
    tokenizer_files: Sequence[Path] = (),
    end_of_text: int | None = None,
) -> None:
    """Write a checkpoint that `AutoModelForCausalLM.from_pretrained(out_dir)` loads.

    One tensor is in memory at a time. The folder appears when everything is in it.

    Args:
        source: all parameters by name, in any order; read one at a time.
        config: the model they belong to.
        out_dir: a folder that does not exist yet, or is empty.
        dtype: dtype in the files: fp32, bf16 or fp16.
        max_shard_bytes: size at which a further weight file begins.
        tokenizer_files: files to copy beside the weights.
        end_of_text: token that ends a text, if there is one.

    Raises:
        ConfigError: if GPT-2's format cannot express the model.
        CheckpointError: if the folder is not empty, or the tensors are not those of the model.
    """
    hf_config = config_to_hf(config, end_of_text=end_of_text) | {"dtype": str(dtype).removeprefix("torch.")}
    if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise CheckpointError(
            "the export folder is not empty", where=str(out_dir), remedy="name a new folder"
        )
    pairs = source.items() if isinstance(source, Mapping) else source
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out_dir.name}-", dir=out_dir.parent) as scratch:
        partial = Path(scratch) / out_dir.name
        partial.mkdir()
        try:
            _write_weights(pairs, config, partial, dtype, max_shard_bytes)
            (partial / CONFIG_FILE).write_text(json.dumps(hf_config, indent=2, sort_keys=True) + "\n")
            for file in tokenizer_files:
                shutil.copy(file, partial / file.name)
            partial.replace(out_dir)
        except OSError as error:
            raise CheckpointError(
                f"the export failed: {error}",
                where=str(out_dir),
                remedy="make room or name another folder; nothing was left behind",
            ) from error


def import_hf(folder: Path) -> tuple[GPTConfig, Iterator[tuple[str, Tensor]]]:
    """The model section and, one at a time, all parameters by this package's names.

    Raises:
        ConfigError: if `config.json` is missing or describes another kind of model.
        CheckpointError: while iterating, if a file is damaged, or a tensor is missing, unknown or misshapen.
    """
    path = folder / CONFIG_FILE
    try:
        hf_config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot read the model's config: {error}",
            where=str(path),
            remedy="name a folder that save_pretrained has written",
        ) from error
    config = config_from_hf(hf_config, where=str(path))
    return config, _read_weights(config, folder)


def _write_weights(
    pairs: Iterable[tuple[str, Tensor]],
    config: GPTConfig,
    folder: Path,
    dtype: torch.dtype,
    max_shard_bytes: int,
) -> None:
    shapes = _shapes(config)
    layout = {}
    for name, shape in shapes.items():
        hf_name, rule = match_rule(name, GPT2_RULES)
        layout[hf_name] = (dtype, rule.transform.shape(shape))
    shards = plan_shards(layout, max_shard_bytes)
    # A state_dict names a shared weight twice; the second name holds nothing new.
    own = (pair for pair in pairs if not (config.share_embedding_weights and pair[0] == "head.weight"))
    with ShardWriter(folder, shards) as writer:
        for name, tensor in convert(own, GPT2_RULES, shapes, where="the exported parameters"):
            writer.write(name, tensor)
    if len(shards) > 1:
        (folder / INDEX_FILE).write_text(json.dumps(weight_index(shards), indent=2) + "\n")


def _read_weights(config: GPTConfig, folder: Path) -> Iterator[tuple[str, Tensor]]:
    shapes = _shapes(config)
    expected = [match_rule(name, GPT2_RULES)[0] for name in shapes]
    pairs = _normalized(read_tensors(folder), config)
    for name, tensor in convert(pairs, invert(GPT2_RULES), expected, where=str(folder)):
        if tuple(tensor.shape) != shapes[name]:
            raise CheckpointError(
                f"{name} has shape {tuple(tensor.shape)}, {CONFIG_FILE} says {shapes[name]}",
                where=str(folder),
                remedy=f"check that {CONFIG_FILE} belongs to the weights",
            )
        yield name, tensor


def _normalized(pairs: Iterable[tuple[str, Tensor]], config: GPTConfig) -> Iterator[tuple[str, Tensor]]:
    """Without what carries no weight, and with the prefix that checkpoints of the bare decoder leave out."""
    for name, tensor in pairs:
        if name.endswith((".attn.bias", ".attn.masked_bias")):
            continue  # causal masks that old versions saved
        if name == "lm_head.weight" and config.share_embedding_weights:
            continue
        known = name.startswith(("transformer.", "lm_head."))
        yield (name if known else f"transformer.{name}"), tensor


def _shapes(config: GPTConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter of the model; shared ones once, by their first name."""
    model = build_model(config, device="meta")
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
