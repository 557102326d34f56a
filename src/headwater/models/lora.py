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

PublicParts = Callable[[str], Sequence[tuple[str, int]]]
"""What the public Model Zoo calls the matrices in a parameter, each with its rows (-1: all)."""


def add_adapters(model: nn.Module, config: LoRAConfig, parts: PublicParts) -> None:
    """Give the linear layers that `config` names adapters, and freeze all else.

    Raises:
        ConfigError: if it names none.
    """
    model.requires_grad_(False)
    linears = [(name, layer) for name, layer in model.named_modules() if type(layer) is Linear]
    found = False
    for name, layer in linears:
        rows = _target_rows(name, layer.out_features, config, parts)
        if not rows:
            continue
        found = True
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
    if not found:
        example = next((name for name, _ in linears if "." in name), "none")
        raise ConfigError(
            f"no linear layer is called like {' or '.join(config.target_modules)}",
            where="model.lora_params.target_modules",
            remedy=f"write patterns of names such as {example}",
        )


def _target_rows(name: str, outputs: int, config: LoRAConfig, parts: PublicParts) -> list[slice]:
    """The rows of a layer that get adapters; none where it is not meant."""
    if _is_meant(name, config):
        return [slice(0, outputs)]
    rows, start = [], 0
    for public, count in parts(f"{name}.weight"):
        stop = outputs if count < 0 else start + count
        if _is_meant(public.removesuffix(".weight"), config):
            rows.append(slice(start, stop))
        start = stop
    return rows


def _is_meant(name: str, config: LoRAConfig) -> bool:
    last = name.rpartition(".")[2]
    return any(
        fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(last, pattern)
        for pattern in config.target_modules
    )


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
    weights: Iterable[tuple[str, Tensor]], config: LoRAConfig, parts: PublicParts, layers: Collection[str]
) -> Iterator[tuple[str, Tensor]]:
    """The weights of the model without adapters that computes the same.

    Args:
        weights: of the model with adapters, by name; the three of a layer follow each other closely.
        config: of the adapters.
        parts: see `PublicParts`.
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
                rows = _target_rows(layer, len(three["weight"]), config, parts)
                scale = config.alpha / config.r
                yield (
                    f"{layer}.weight",
                    merged(three["weight"], three["lora_a"], three["lora_b"], rows, scale),
                )
        else:
            yield name, tensor
    assert not waiting, f"adapters of {', '.join(waiting)} are not whole"
