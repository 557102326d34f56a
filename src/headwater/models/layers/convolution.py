"""Convolutions and batch normalization, whose weights the model initialises by name."""

from __future__ import annotations

import torch
from torch import nn


class Conv2d(nn.Conv2d):
    """`nn.Conv2d` that draws no random numbers when it is made: its memory is uninitialised."""

    def reset_parameters(self) -> None:
        """Do nothing: `headwater.models.layers.initializers` sets the weights."""


class ConvTranspose2d(nn.ConvTranspose2d):
    """`nn.ConvTranspose2d` that draws no random numbers when it is made: its memory is uninitialised."""

    def reset_parameters(self) -> None:
        """Do nothing: `headwater.models.layers.initializers` sets the weights."""


class BatchNorm2d(nn.BatchNorm2d):
    """`nn.BatchNorm2d` whose statistics have values even if its weights are on the meta device.

    Args:
        channels: channels of the input.
        epsilon: number that is added to the variance.
    """

    def __init__(self, channels: int, epsilon: float) -> None:
        super().__init__(channels, eps=epsilon)
        self.running_mean = torch.zeros(channels, device="cpu")
        self.running_var = torch.ones(channels, device="cpu")
        self.num_batches_tracked = torch.zeros((), dtype=torch.long, device="cpu")
