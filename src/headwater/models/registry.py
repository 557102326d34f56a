"""Model families by the name that a params file gives them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from headwater.config.models import DECODERS, MODELS, ModelConfig
from headwater.models import decoder


@dataclasses.dataclass(frozen=True)
class Family:
    """What the package knows about a kind of model.

    Attributes:
        config: schema of its model section.
        model: makes the module. Its `forward(batch)` gives the loss.
        init_parameter: initial value of one parameter from name, shape, config and seed.
        learning_rate_scale: factor on the learning rate of one parameter from name and config.
    """

    config: type[ModelConfig]
    model: Callable[..., nn.Module]
    init_parameter: Callable[[str, Sequence[int], ModelConfig, int], Tensor]
    learning_rate_scale: Callable[[str, ModelConfig], float]


FAMILIES: dict[str, Family] = {
    name: Family(MODELS[name], decoder.Decoder, decoder.init_parameter, decoder.learning_rate_scale)
    for name in DECODERS
}
"""Families by the `name` of the model section."""


def build_model(
    config: ModelConfig, *, device: str = "cpu", fused_loss: bool = True, seed: int = 0
) -> nn.Module:
    """The module that `config` describes.

    Args:
        config: the model section of a params file.
        device: where its parameters are made; on `meta` they take no memory and have no values.
        fused_loss: see `Decoder`.
        seed: seed of the initial weights.
    """
    with torch.device(device):
        return FAMILIES[config.name].model(config, fused_loss=fused_loss, seed=seed)


def init_parameter(name: str, shape: Sequence[int], config: ModelConfig, seed: int) -> Tensor:
    """Initial value of one parameter of the model that `config` describes, fp32 on the CPU."""
    return FAMILIES[config.name].init_parameter(name, shape, config, seed)


def learning_rate_scale(name: str, config: ModelConfig) -> float:
    """Factor on the learning rate of one parameter of the model that `config` describes."""
    return FAMILIES[config.name].learning_rate_scale(name, config)
