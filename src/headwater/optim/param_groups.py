"""Parameter groups of a model: which parameters decay, which rates are scaled, which have tags."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from headwater.core.errors import ConfigError
from headwater.optim.scheduler import NO_WEIGHT_DECAY
from headwater.optim.spec import is_bias_or_norm

_LAYERS = {
    "embedding": ("*embedding*weight",),
    "decoder_kernel": (
        "*decoder*dense*weight", "*decoder*linear*weight", "blocks.*.attention.*weight",
        "blocks.*.ffn.*weight",
    ),
}  # fmt: skip
"""Kinds of layers that `adjust_learning_rate` may name, with the patterns of their parameters' names."""


def configure_param_groups(
    model: torch.nn.Module, optimizer_params: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The trainable parameters of `model` in as few groups as their options allow.

    Each group has its `weight_decay`: 0 for biases and parameters of normalization layers, which weight-decay
    schedulers leave alone too unless they name the group's tag.

    Args:
        model: whose parameters.
        optimizer_params: arguments of the optimizer, of which these are read: `weight_decay`;
            `adjust_learning_rate`, which maps a pattern of parameter names (or `embedding`, `decoder_kernel`)
            to a factor, given to the group for `ScalePerParamLR`; `params`, a list of
            `{"params": pattern or patterns, "tag": name}`, for schedulers with `param_group_tags`.
            In a pattern `*` stands for anything, dots included.

    Returns:
        Groups for `configure_optimizer` or any optimizer, in the order of their first parameters.

    Raises:
        ConfigError: if a pattern matches no parameter.
    """
    named = {name: param for name, param in model.named_parameters() if param.requires_grad}
    factors = learning_rate_factors(optimizer_params.get("adjust_learning_rate") or {}, named)
    tags = _tags(optimizer_params.get("params") or [], named)
    decay = float(optimizer_params.get("weight_decay", 0.0))
    groups: dict[tuple[object, ...], dict[str, Any]] = {}
    for name, param in named.items():
        decays = not is_bias_or_norm(name, tuple(param.shape))
        options: dict[str, Any] = {"weight_decay": decay if decays else 0.0, NO_WEIGHT_DECAY: not decays}
        if factors:
            options["adjust_learning_rate"] = factors.get(name, 1.0)
        if name in tags:
            options["tags"] = tags[name]
        group = groups.setdefault(tuple(options.items()), {"params": [], **options})
        group["params"].append(param)
    return list(groups.values())


def learning_rate_factors(adjustments: Mapping[str, float], names: Iterable[str]) -> dict[str, float]:
    """The factor on the learning rate of each parameter that has one; the first that matches counts.

    Args:
        adjustments: see `adjust_learning_rate` of `configure_param_groups`.
        names: of all parameters.

    Raises:
        ConfigError: if a pattern matches no parameter.
    """
    factors: dict[str, float] = {}
    for layers, factor in adjustments.items():
        for name in _matching(_LAYERS.get(layers, (layers,)), names, f"adjust_learning_rate: {layers}"):
            factors.setdefault(name, float(factor))
    return factors


def _tags(filters: Any, names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The tags of each parameter that has any."""
    tags: dict[str, tuple[str, ...]] = {}
    for entry in [filters] if isinstance(filters, Mapping) else filters:
        if set(entry) != {"params", "tag"}:
            raise ConfigError(
                f"an entry of params has the keys params and tag, found {', '.join(entry)}",
                remedy="write for example {params: '*.mlp.*', tag: mlp}",
            )
        patterns = [entry["params"]] if isinstance(entry["params"], str) else entry["params"]
        for name in _matching(patterns, names, f"params of tag {entry['tag']}"):
            tags[name] = (*tags.get(name, ()), entry["tag"])
    return tags


def _matching(patterns: Sequence[str], names: Iterable[str], where: str) -> list[str]:
    found = [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]
    if not found:
        raise ConfigError(
            f"no trainable parameter is called like {' or '.join(patterns)}",
            where=where,
            remedy=f"write a pattern of names such as {next(iter(names), 'none')}",
        )
    return found
