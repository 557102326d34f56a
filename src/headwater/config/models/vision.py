"""Models of images."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from headwater.config.base import NoEffect, Section
from headwater.config.models.common import Nonlinearity, Rate


class FCMnistConfig(Section):
    """Handwritten digits by fully connected layers.

    Attributes:
        depth: hidden layers.
        hidden_size: width of each.
        dropout: rate after each.
        activation_fn: after each.
        compute_eval_metrics: accuracy besides the loss.
    """

    name: Literal["fc_mnist"]
    depth: int = Field(default=2, ge=1)
    hidden_size: int = Field(default=256, ge=1)
    dropout: Rate = 0.0
    activation_fn: Nonlinearity = "relu"
    compute_eval_metrics: bool = True
    to_float16: Annotated[bool, NoEffect("the precision of the run holds")] = False
