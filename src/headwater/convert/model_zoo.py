"""Weights of decoders and of BERT in checkpoints that Cerebras' Model Zoo has written."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from headwater.config.models import ModelConfig
from headwater.config.models.decoder import DecoderConfig
from headwater.config.models.encoder import BertConfig
from headwater.convert.checkpoint import joined
from headwater.convert.formats.base import qkv_rows
from headwater.convert.rules import (
    Mapped,
    Rule,
    missing,
    reordered,
    same,
    stacked,
    unexpected,
)
from headwater.core.errors import CheckpointError, ConfigError
from headwater.core.file_tensor import FileTensor
from headwater.core.mdl import read_mdl
from headwater.models.layers.positions import alibi_slopes
from headwater.models.registry import FAMILIES, build_model

_PREFIX = "model."
"""In a checkpoint of a run the weights are below the key `model`; the Model Zoo's classes add it again."""

_COPIES = ("ln_f.weight", "ln_f.bias")
"""Second names of the last norm."""

_SLOPES = "embedding_layer.position_embed_helper.slopes"
"""The slopes of ALiBi, which are stored even if they are constants."""


def zoo_tensors(path: Path) -> Iterator[FileTensor]:
    """Yield the tensors of the model in a checkpoint of the Model Zoo, under the names in its module.

    Raises:
        ConfigError: if a package that reads these files is not installed.
        CheckpointError: if the file is damaged, or was not written by Cerebras' software.
    """
    tensors = read_mdl(path).tensors
    # A file may also hold the weights alone, without the key `model`.
    is_state = any(name.startswith(_PREFIX) for name in tensors)
    for name, tensor in tensors.items():
        if not is_state or name.startswith(_PREFIX):
            while name.startswith(_PREFIX):
                name = name.removeprefix(_PREFIX)
            yield dataclasses.replace(tensor, name=name)


def zoo_readers(path: Path, config: ModelConfig) -> dict[str, Callable[[], Tensor]]:
    """Return, by name in our model, a function that reads the parameter from a checkpoint of the Model Zoo.

    Args:
        path: the checkpoint.
        config: the model section of the params file with which it was trained.

    Raises:
        ConfigError: if a package that reads these files is not installed, or a key of the model has another
            meaning in the Model Zoo.
        CheckpointError: if the file is damaged, a tensor is missing or unknown, or the model is of a kind
            that cannot be read. The functions raise it if a tensor has an unexpected shape.
    """
    _check_meaning(config)
    model = build_model(config, device="meta")
    mapped = _map_model(model, config, path)
    expected = dict.fromkeys(name for each in mapped.values() for name in each.theirs)
    places = {stored.name: stored for stored in zoo_tensors(path)}
    shared = dict(_second_names(model, config))
    ignored = {*_COPIES, *shared}
    if getattr(config, "position_embedding_type", None) == "alibi":
        ignored.add(_SLOPES)
    unknown = next((name for name in places if name not in expected and name not in ignored), None)
    if unknown is not None and unknown.endswith("_mask"):
        raise CheckpointError(
            f"the file is of a sparse run: it has the mask {unknown}",
            where=str(path),
            remedy="only weights of dense runs can be read",
        )
    if unknown is not None:
        raise unexpected(unknown, expected, str(path))
    if absent := [name for name in expected if name not in places]:
        raise missing(absent, str(path))
    if _SLOPES in places and _SLOPES not in expected:
        _check_slopes(places[_SLOPES], config, path)
    for name, embedding in shared.items():
        if name in places:
            _check_shared(places[name], places[embedding], path)
    return {name: partial(joined, each, places, str(path)) for name, each in mapped.items()}


def check_defaults(config: ModelConfig, written: Collection[str], *, where: str) -> None:
    """Raise if a key that the params lack has another default in the Model Zoo, which trained the model.

    Keys whose defaults change names or shapes of tensors are not checked here: `zoo_readers` finds these.

    Args:
        config: the model section.
        written: the keys of the model section in the params file.
        where: the params file.

    Raises:
        ConfigError: if there is such a key.
    """
    for key, (theirs, ours) in _defaults(config).items():
        if key not in written and theirs != ours:
            raise ConfigError(
                f"the params have no {key}: the Model Zoo uses {theirs} then, and Headwater {ours}",
                where=where,
                remedy=f"write {key} in the model section: {theirs} if the Model Zoo trained with this file",
            )


def _defaults(config: ModelConfig) -> dict[str, tuple[object, object]]:
    """Return, by key, the value that the Model Zoo uses if the key is absent, and the value here.

    Source: the Model Zoo 2.10.0, `gpt2_model.py`, `gptj_model.py` and `bert_model.py`.
    """
    if isinstance(config, BertConfig):
        return {
            "layer_norm_epsilon": (1e-5, config.layer_norm_epsilon),
            "pooler_nonlinearity": (config.encoder_nonlinearity, config.pooler_nonlinearity),
        }
    if not isinstance(config, DecoderConfig):
        return {}
    found: dict[str, tuple[object, object]] = {
        key: (default, getattr(config, key))
        for key, default in {
            "nonlinearity": "gelu",
            "layer_norm_epsilon": 1e-5,
            "attention_logit_softcapping": None,
            "final_logit_softcapping": None,
        }.items()
    }
    if config.position_embedding_type == "rotary":
        found["rotary_dim"] = (int(config.hidden_size // config.num_heads * 0.25), config.rotary_size)
    if config.pos_scaling_factor != 1:
        found["pos_scaling_type"] = ("linear", config.pos_scaling_type)
    if config.mup_base_hidden_size is not None and config.name not in _OF_GPTJ:
        found["scale_qk_dot_by_d"] = (True, config.scale_qk_dot_by_d)
    return found


_OF_GPTJ = ("gptj", "gpt-neox", "codegen")
"""Decoders that the Model Zoo builds with its class of GPT-J."""


def _check_meaning(config: ModelConfig) -> None:
    """Raise `ConfigError` if weights of the Model Zoo would be used in another way than they were trained."""
    if not isinstance(config, DecoderConfig):
        return
    alternating = config.sliding_window_every_other_decoder_layer
    moe = config.moe
    other = {
        "sliding_window_every_other_decoder_layer": alternating and config.attention_sliding_window_length,
        "embeddings_scale": config.embedding_layer_norm and config.embeddings_scale != 1,
        "moe.top_k": moe is not None and moe.top_k == 1,
        "pos_scaling_factor": config.position_embedding_type == "alibi" and config.pos_scaling_factor != 1,
        "attention_sink_tokens": config.attention_sink_tokens and config.name not in _OF_GPTJ,
        "position_embedding_type": config.position_embedding_type == "fixed",
        "lora_params": config.lora_params is not None,
    }
    for key, is_other in other.items():
        if is_other:
            raise ConfigError(
                f"with this {key} the Model Zoo computes another function than Headwater",
                where=f"model.{key}",
                remedy="convert the file to Hugging Face's format with the Model Zoo",
            )


def _second_names(model: nn.Module, config: ModelConfig) -> Iterator[tuple[str, str]]:
    """Yield the Model Zoo's names of heads that share the weights of an embedding, and of the embedding."""
    own = {parameter: name for name, parameter in model.named_parameters()}
    public = FAMILIES[config.name].public_parts
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name != own[parameter]:
            yield public(name, config)[0][0], public(own[parameter], config)[0][0]


def _check_shared(head: FileTensor, embedding: FileTensor, path: Path) -> None:
    """Raise `CheckpointError` unless a head has the weights of the embedding."""
    if head.read != embedding.read and not torch.equal(head.read(), embedding.read()):
        raise CheckpointError(
            f"{head.name} differs from {embedding.name}, but the model shares them",
            where=str(path),
            remedy="write share_embedding_weights: False in the model section",
        )


def _check_slopes(stored: FileTensor, config: ModelConfig, path: Path) -> None:
    """Raise `CheckpointError` unless the constant slopes of a model with ALiBi are those of our model."""
    slopes = stored.read().float().flatten()
    wanted = alibi_slopes(config.num_heads) if isinstance(config, DecoderConfig) else None
    if wanted is None or len(slopes) != len(wanted):
        raise CheckpointError(
            f"the file has slopes of ALiBi for {len(slopes)} heads, but the model has another number",
            where=str(path),
            remedy="check that the model's config belongs to the checkpoint",
        )
    if not torch.allclose(slopes, wanted, rtol=1e-2):
        raise CheckpointError(
            "the slopes of ALiBi in the file are not those of the paper (arXiv:2108.12409)",
            where=str(path),
            remedy="write alibi_trainable_slopes: True in the model section, so that they are read",
        )


def _map_model(model: nn.Module, config: ModelConfig, path: Path) -> Mapping[str, Mapped]:
    """Return every parameter of a model by name, with the tensors of the Model Zoo that hold it."""
    mapped = {}
    for name, parameter in model.named_parameters():
        rule = _rule(name, config, path)
        mapped[name] = Mapped(name, tuple(parameter.shape), rule.theirs, rule)
    return mapped


def _rule(name: str, config: ModelConfig, path: Path) -> Rule:
    """Return the rule of one parameter.

    Raises:
        CheckpointError: if the Model Zoo's names of this kind of model are not known.
    """
    parts = FAMILIES[config.name].public_parts(name, config)
    if not parts:
        raise CheckpointError(
            f"{name} of the model {config.name} has no counterpart in these files that is known",
            where=str(path),
            remedy="decoders and BERT can be read; convert other models to Hugging Face's format with the "
            "Model Zoo",
        )
    names = [theirs for theirs, _ in parts]
    if names == [_SLOPES]:
        return Rule(name, (_SLOPES,), lambda tensor: [tensor[:, None]], lambda parts: parts[0].flatten())
    if len(names) == 1:
        has_offset = name.endswith("norm.weight") and getattr(config, "norm_unit_offset", False)
        return _with_offset(name, names[0]) if has_offset else same(name, names[0])
    rule = stacked(name, names, [rows for _, rows in parts])
    if ".qkv." in name and isinstance(config, DecoderConfig) and config.rotary_style == "half":
        return reordered(rule, _rotary_order(config))
    return rule


def _with_offset(name: str, theirs: str) -> Rule:
    """Return the rule of a norm that multiplies by 1 + our weight. The Model Zoo stores this sum."""
    return Rule(name, (theirs,), lambda tensor: [tensor + 1], lambda parts: parts[0] - 1)


def _rotary_order(config: DecoderConfig) -> Tensor:
    """Return the order of the rows of queries, keys and values if our model rotates the halves of a head.

    The Model Zoo's classes always rotate neighbours. In their rows, elements of the first and of the second
    half alternate.

    Returns:
        For each row of theirs, the index of our row.
    """
    rotated = config.rotary_size if config.position_embedding_type == "rotary" else 0
    head = torch.arange(config.head_size)
    head[:rotated] = torch.arange(rotated).view(2, -1).t().flatten()
    queries, keys, values = torch.arange(sum(qkv_rows(config))).split(qkv_rows(config))
    in_heads = [rows.view(-1, config.head_size)[:, head].flatten() for rows in (queries, keys)]
    return torch.cat([*in_heads, values])
