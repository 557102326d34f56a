"""Fully connected network that classifies handwritten digits."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headwater.config.models.common import InitializerConfig
from headwater.config.models.vision import FCMnistConfig
from headwater.models.evaluation import Accuracy
from headwater.models.layers.feed_forward import NONLINEARITIES
from headwater.models.layers.initializers import draw, initialize
from headwater.models.layers.linear import Linear

PIXELS = 28 * 28
CLASSES = 10


class FCMnist(nn.Module):
    """A classifier of handwritten digits. `forward` returns the training loss.

    Args:
        config: the model section of a params file.
        seed: seed of the initial weights.
    """

    def __init__(self, config: FCMnistConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        widths = [PIXELS, *[config.hidden_size] * config.depth]
        self.hidden = nn.ModuleList(Linear(inputs, outputs) for inputs, outputs in itertools.pairwise(widths))
        self.dropout = nn.Dropout(config.dropout)
        self.output = Linear(config.hidden_size, CLASSES)
        self.nonlinearity = NONLINEARITIES[config.activation_fn]
        self.scored = {"accuracy": Accuracy("accuracy")} if config.compute_eval_metrics else {}
        initialize(self, lambda name, shape: init_parameter(name, shape, config, seed))

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the training loss, a scalar in fp32, of `inputs` [batch, 1, 28, 28] and `labels` [batch]."""
        logits, labels = self.logits(batch), batch["labels"].long()
        if not self.training and self.scored:
            self.scored["accuracy"].add(logits.argmax(-1) == labels)
        return F.cross_entropy(logits, labels)

    def logits(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the logits [batch, 10], fp32."""
        x = batch["inputs"].flatten(1)
        for layer in self.hidden:
            x = self.dropout(self.nonlinearity(layer(x)))
        return self.output(x).float()  # type: ignore[no-any-return]


def init_parameter(name: str, shape: Sequence[int], config: FCMnistConfig, seed: int) -> Tensor:
    """Return the initial value of parameter `name`: He's (arXiv:1502.01852, equation 10) or 0 for a bias."""
    if name.endswith("bias"):
        return torch.zeros(*shape)
    return draw(name, shape, InitializerConfig(name="normal", std=(2 / shape[1]) ** 0.5), seed)
