"""LoRA (arXiv:2106.09685): adds low-rank adapters to a model, and merges them into its weights."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from headwater.config.models.lora import LoRAConfig
from headwater.core.errors import ConfigError
from headwater.core.seeding import derive_seed
from headwater.models.layers.linear import Linear, LinearAfter
from headwater.models.layers.lora import LoRALinear, merged

_PLAIN = (Linear, LinearAfter)
"""The layers that may get adapters."""

Parts = Sequence[tuple[str, int]]
"""The matrices stacked in a parameter: names in another library, and numbers of rows (-1: all)."""

Namings = Callable[[str], Sequence[Parts]]
"""Function that returns the matrices in a parameter, once for each library whose names are accepted."""


def add_adapters(model: nn.Module, config: LoRAConfig, namings: Namings) -> None:
    """Add adapters to the linear layers that `config` names, and freeze all other parameters.

    Args:
        model: model to change in place.
        config: section of the adapters, with the patterns of names.
        namings: names of the layers in other libraries, which patterns may use.

    Raises:
        ConfigError: if a pattern matches no layer.
    """
    model.requires_grad_(False)
    # Not `isinstance`: subclasses such as the head have another forward. A list: the loop replaces layers.
    linears = [(name, layer) for name, layer in model.named_modules() if type(layer) in _PLAIN]
    _check_patterns([name for name, _ in linears], config, namings)
    for name, layer in linears:
        rows = _target_rows(name, layer.out_features, config, namings)
        if not rows:
            continue
        adapted = LoRALinear(
            layer.in_features,
            layer.out_features,
            rank=config.r,
            scale=config.alpha / config.r,
            dropout=config.dropout,
            rows=rows,
            bias=layer.bias is not None,
        )
        # These are frozen. Those that `LoRALinear` has made would be trained.
        adapted.weight, adapted.bias = layer.weight, layer.bias
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, adapted)


def _check_patterns(linears: Sequence[str], config: LoRAConfig, namings: Namings) -> None:
    """Raise a `ConfigError` if a pattern of `target_modules` matches no linear layer."""
    others = [
        part.removesuffix(".weight")
        for linear in linears
        for parts in namings(f"{linear}.weight")
        for part, _ in parts
    ]
    names = (*linears, *others)
    for pattern in config.target_modules:
        if not any(_matches(name, pattern) for name in names):
            short = dict.fromkeys(name.rpartition(".")[2] for name in others)
            raise ConfigError(
                f"{pattern} matches no linear layer of this model",
                where="model.lora_params.target_modules",
                remedy=f"use some of {', '.join(short)}, or a pattern of names such as {linears[0]}",
            )


def _target_rows(name: str, outputs: int, config: LoRAConfig, namings: Namings) -> list[slice]:
    """Return the rows of each matrix in a layer that gets an adapter; empty if no matrix gets one."""
    if _is_meant(name, config):
        return [slice(0, outputs)]
    found: set[tuple[int, int]] = set()
    for parts in namings(f"{name}.weight"):
        start = 0
        for other, count in parts:
            stop = outputs if count < 0 else start + count
            if _is_meant(other.removesuffix(".weight"), config):
                found.add((start, stop))
            start = stop
    # If a pattern matches the whole layer, the layer has one adapter, even if patterns also match its parts.
    whole = {(0, outputs)} & found
    return [slice(start, stop) for start, stop in sorted(whole or found)]


def _is_meant(name: str, config: LoRAConfig) -> bool:
    return any(_matches(name, pattern) for pattern in config.target_modules)


def _matches(name: str, pattern: str) -> bool:
    last = name.rpartition(".")[2]
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(last, pattern)


def is_adapter(name: str) -> bool:
    """True if a parameter with this name belongs to an adapter."""
    return name.endswith((".lora_a", ".lora_b"))


def init_adapter(name: str, shape: Sequence[int], seed: int) -> Tensor:
    """Return the initial value of an adapter's parameter: A is uniform in ±1/√inputs, B is zero.

    Args:
        name: qualified name of the parameter.
        shape: shape of the parameter.
        seed: seed of the run.
    """
    value = torch.zeros(*shape, device="cpu", dtype=torch.float32)
    if name.endswith(".lora_a"):
        generator = torch.Generator().manual_seed(derive_seed(seed, "init", name))
        value.uniform_(-(shape[1] ** -0.5), shape[1] ** -0.5, generator=generator)
    return value


def merge_adapters(
    weights: Iterable[tuple[str, Tensor]], config: LoRAConfig, namings: Namings, layers: Collection[str]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of the equivalent model without adapters.

    Args:
        weights: names and weights of the model with adapters. The three weights of a layer should be close to
            each other, because they are held in memory until all have arrived.
        config: section of the adapters.
        namings: see `Namings`.
        layers: names of the layers that have adapters.
    """
    waiting: dict[str, dict[str, Tensor]] = {}
    for name, tensor in weights:
        layer, _, kind = name.rpartition(".")
        if layer in layers and kind in ("weight", "lora_a", "lora_b"):
            three = waiting.setdefault(layer, {})
            three[kind] = tensor
            if len(three) == 3:
                del waiting[layer]
                rows = _target_rows(layer, len(three["weight"]), config, namings)
                scale = config.alpha / config.r
                yield (
                    f"{layer}.weight",
                    merged(three["weight"], three["lora_a"], three["lora_b"], rows, scale),
                )
        else:
            yield name, tensor
    assert not waiting, f"adapters of {', '.join(waiting)} are incomplete"
