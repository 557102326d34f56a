"""Low-rank adapters put into a model, and merged into its weights (arXiv:2106.09685)."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from headwater.config.models.lora import LoRAConfig
from headwater.core.errors import ConfigError
from headwater.core.seeding import derive_seed
from headwater.models.layers.linear import Linear
from headwater.models.layers.lora import LoRALinear, merged

Parts = Sequence[tuple[str, int]]
"""The matrices in a parameter, by the names of another library, each with its rows (-1: all)."""

Namings = Callable[[str], Sequence[Parts]]
"""The parts of the parameter of that name, once for each library whose names are accepted."""


def add_adapters(model: nn.Module, config: LoRAConfig, namings: Namings) -> None:
    """Give the linear layers that `config` names adapters, and freeze all else.

    Raises:
        ConfigError: if a pattern names no layer.
    """
    model.requires_grad_(False)
    linears = [(name, layer) for name, layer in model.named_modules() if type(layer) is Linear]
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
        adapted.weight, adapted.bias = layer.weight, layer.bias
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, adapted)


def _check_patterns(linears: Sequence[str], config: LoRAConfig, namings: Namings) -> None:
    """Raise if a pattern matches no name of a linear layer."""
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
                f"no linear layer of this model is called {pattern}",
                where="model.lora_params.target_modules",
                remedy=f"write some of {', '.join(short)}, or patterns of our names such as {linears[0]}",
            )


def _target_rows(name: str, outputs: int, config: LoRAConfig, namings: Namings) -> list[slice]:
    """The rows of a layer that get adapters; none if the layer is not a target."""
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
    # A layer that is named as a whole has one adapter, whatever parts of it are named besides.
    whole = {(0, outputs)} & found
    return [slice(start, stop) for start, stop in sorted(whole or found)]


def _is_meant(name: str, config: LoRAConfig) -> bool:
    return any(_matches(name, pattern) for pattern in config.target_modules)


def _matches(name: str, pattern: str) -> bool:
    last = name.rpartition(".")[2]
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(last, pattern)


def is_adapter(name: str) -> bool:
    """Whether a parameter of that name is one of an adapter."""
    return name.endswith((".lora_a", ".lora_b"))


def init_adapter(name: str, shape: Sequence[int], seed: int) -> Tensor:
    """Initial value of an adapter's parameter: A uniform within ± one over the root of its inputs, B zero."""
    value = torch.zeros(*shape, device="cpu", dtype=torch.float32)
    if name.endswith(".lora_a"):
        generator = torch.Generator().manual_seed(derive_seed(seed, "init", name))
        value.uniform_(-(shape[1] ** -0.5), shape[1] ** -0.5, generator=generator)
    return value


def merge_adapters(
    weights: Iterable[tuple[str, Tensor]], config: LoRAConfig, namings: Namings, layers: Collection[str]
) -> Iterator[tuple[str, Tensor]]:
    """The weights of the model without adapters that computes the same.

    Args:
        weights: of the model with adapters, by name; the three of a layer follow each other closely.
        config: of the adapters.
        namings: see `Namings`.
        layers: names of those that have adapters.
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
    assert not waiting, f"adapters of {', '.join(waiting)} are not whole"
