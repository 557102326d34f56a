"""Linear and embedding layers whose weights a model initialises by name."""

from __future__ import annotations

from torch import nn


class Linear(nn.Linear):
    """`nn.Linear` that draws no random numbers when it is made: its memory is uninitialised."""

    def reset_parameters(self) -> None:
        """Nothing: see `headwater.models.layers.initializers`."""


class Embedding(nn.Embedding):
    """`nn.Embedding` that draws no random numbers when it is made: its memory is uninitialised."""

    def reset_parameters(self) -> None:
        """Nothing: see `headwater.models.layers.initializers`."""
