"""Weights of decoders and of BERT in checkpoints that Cerebras' Model Zoo has written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from headwater.config.models import ModelConfig
from headwater.config.models.decoder import DecoderConfig
from headwater.convert.checkpoint import joined, parameter_shapes
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
from headwater.convert.stored import StoredTensor
from headwater.core.errors import CheckpointError
from headwater.core.mdl import read_mdl
from headwater.models.layers.positions import alibi_slopes
from headwater.models.registry import FAMILIES, build_model

_PREFIX = "model."
"""In a checkpoint of a run the weights are below the key `model`; the Model Zoo's classes add it again."""

_COPIES = ("ln_f.weight", "ln_f.bias")
"""Second names of the last norm."""

_SLOPES = "embedding_layer.position_embed_helper.slopes"
"""The slopes of ALiBi, which are stored even if they are constants."""


def zoo_tensors(path: Path) -> Iterator[StoredTensor]:
    """Yield the tensors of the model in a checkpoint of the Model Zoo, under the names in its module.

    Raises:
        ConfigError: if a package that reads these files is not installed.
        CheckpointError: if the file is damaged, or is no such checkpoint.
    """
    tensors = read_mdl(path).tensors
    # A file may also hold the weights alone, without the key `model`.
    is_state = any(name.startswith(_PREFIX) for name in tensors)
    for name, tensor in tensors.items():
        if not is_state or name.startswith(_PREFIX):
            while name.startswith(_PREFIX):
                name = name.removeprefix(_PREFIX)
            yield StoredTensor(name, tensor.shape, tensor.dtype, tensor.read)


def zoo_readers(path: Path, config: ModelConfig) -> dict[str, Callable[[], Tensor]]:
    """Return, by name in our model, a function that reads the parameter from a checkpoint of the Model Zoo.

    Args:
        path: the checkpoint.
        config: the model section of the params file with which it was trained.

    Raises:
        ConfigError: if a package that reads these files is not installed.
        CheckpointError: if the file is damaged, a tensor is missing or unknown, or the model is of a kind
            that cannot be read. The functions raise it if a tensor has an unexpected shape.
    """
    mapped = _map_model(config, path)
    expected = dict.fromkeys(name for each in mapped.values() for name in each.theirs)
    places = {stored.name: stored for stored in zoo_tensors(path)}
    ignored = {*_COPIES, _SLOPES, *_second_names(config)}
    unknown = next((name for name in places if name not in expected and name not in ignored), None)
    if unknown is not None:
        raise unexpected(unknown, expected, str(path))
    if absent := [name for name in expected if name not in places]:
        raise missing(absent, str(path))
    if _SLOPES in places and _SLOPES not in expected:
        _check_slopes(places[_SLOPES], path)
    return {name: partial(joined, each, places, str(path)) for name, each in mapped.items()}


def _second_names(config: ModelConfig) -> Iterator[str]:
    """Yield the Model Zoo's names of heads that share the weights of an embedding."""
    model = build_model(config, device="meta")
    own = dict(model.named_parameters())
    for name, _ in model.named_parameters(remove_duplicate=False):
        if name not in own:
            yield from (theirs for theirs, _ in FAMILIES[config.name].public_parts(name, config))


def _check_slopes(stored: StoredTensor, path: Path) -> None:
    """Raise `CheckpointError` unless the constant slopes of a model with ALiBi are those of our model."""
    slopes = stored.read().float().flatten()
    if not torch.allclose(slopes, alibi_slopes(len(slopes)), rtol=1e-2):
        raise CheckpointError(
            "the slopes of ALiBi in the file are not those of the paper (arXiv:2108.12409)",
            where=str(path),
            remedy="write alibi_trainable_slopes: True in the model section, so that they are read",
        )


def _map_model(config: ModelConfig, path: Path) -> Mapping[str, Mapped]:
    """Return every parameter of a model by name, with the tensors of the Model Zoo that hold it."""
    shapes = parameter_shapes(config)
    rules = {name: _rule(name, config, path) for name in shapes}
    return {name: Mapped(name, shapes[name], rule.theirs, rule) for name, rule in rules.items()}


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
