"""The loss of a batch, as a function of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

LossFunction = Callable[[nn.Module, Any], torch.Tensor]
"""Function (model, batch) -> scalar loss."""


def call_model(model: nn.Module, batch: Any) -> torch.Tensor:
    """Call the model with a batch and return its output as the loss: the default loss function."""
    loss: torch.Tensor = model(batch)
    return loss
