"""Parameter groups of a model, with weight decay, learning-rate factors and tags."""

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
"""Layer kinds that `adjust_learning_rate` accepts, with the patterns of their parameters' names."""


def configure_param_groups(
    model: torch.nn.Module, optimizer_params: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return the trainable parameters of `model`, grouped by their options.

    Each group has a `weight_decay`. It is 0 for biases and parameters of normalization layers. Weight-decay
    schedulers do not change these groups either, unless they name the group's tag.

    Args:
        model: the model.
        optimizer_params: arguments of the optimizer. These are read:
            `weight_decay`;
            `adjust_learning_rate`, which maps a pattern of parameter names (or `embedding`, `decoder_kernel`)
            to a factor for `ScalePerParamLR`;
            `params`, a list of `{"params": pattern or patterns, "tag": name}`, for schedulers with
            `param_group_tags`.
            In a pattern `*` matches any text, including dots.

    Returns:
        Parameter groups for `configure_optimizer` or any optimizer, in the order of their first parameters.

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
        # The mark is needed even if all groups begin with 0: a scheduler may raise the others later.
        options: dict[str, Any] = {"weight_decay": decay if decays else 0.0, NO_WEIGHT_DECAY: not decays}
        if factors:
            options["adjust_learning_rate"] = factors.get(name, 1.0)
        if name in tags:
            options["tags"] = tags[name]
        group = groups.setdefault(tuple(options.items()), {"params": [], **options})
        group["params"].append(param)
    return list(groups.values())


def learning_rate_factors(adjustments: Mapping[str, float], names: Iterable[str]) -> dict[str, float]:
    """Return name -> learning-rate factor of a parameter, for those that match; the first match counts.

    Args:
        adjustments: see `adjust_learning_rate` in `configure_param_groups`.
        names: names of all parameters.

    Raises:
        ConfigError: if a pattern matches no parameter.
    """
    factors: dict[str, float] = {}
    for layers, factor in adjustments.items():
        for name in _matching(_LAYERS.get(layers, (layers,)), names, f"adjust_learning_rate: {layers}"):
            factors.setdefault(name, float(factor))
    return factors


def _tags(filters: Any, names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return name -> tags of a parameter, for the parameters that have any."""
    tags: dict[str, tuple[str, ...]] = {}
    for entry in [filters] if isinstance(filters, Mapping) else filters:
        if set(entry) != {"params", "tag"}:
            raise ConfigError(
                f"expected the keys params and tag in an entry of params, got {', '.join(entry)}",
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
            f"no trainable parameter matches {' or '.join(patterns)}",
            where=where,
            remedy=f"write a pattern that matches names such as {next(iter(names), 'none')}",
        )
    return found
