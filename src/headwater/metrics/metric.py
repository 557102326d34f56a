"""Base class of metrics: a name, states that are summed over batches and ranks, and weights of labels."""

from __future__ import annotations

from typing import Any

import torch
import torchmetrics
from torch import Tensor

from headwater.core.errors import DataError


class Metric(torchmetrics.Metric):
    """Base of metrics over several batches.

    A subclass implements `update`, which adds a batch to its states, and `compute`, which returns the value.
    It creates its states with `register_state`, in `__init__` or in an overridden `reset`.

    All features of torchmetrics work: `persistent(True)` includes the states in the `state_dict`, and
    `compute` sums them over the processes of torch.distributed.

    Args:
        name: name in reports; by default the name of the class.
    """

    def __init__(self, name: str | None = None) -> None:
        super().__init__()
        self.name = name or type(self).__name__
        self.reset()

    def register_state(self, name: str, tensor: Tensor, persistent: bool = False) -> None:
        """Create a tensor of the metric that is summed over batches and ranks.

        Args:
            name: name of the attribute that holds the state.
            tensor: value of the state before the first batch.
            persistent: include the state in the `state_dict`.
        """
        self.add_state(name, tensor, dist_reduce_fx="sum", persistent=persistent)
        # A subclass may override `reset` and create its states there, without torchmetrics' `reset`.
        self._update_count, self._computed = 0, None

    @property
    def num_updates(self) -> int:
        """Batches added since the last reset."""
        return self.update_count

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Add a batch, and return the value over all batches so far."""
        self.update(*args, **kwargs)
        return self.compute()


def check_shape(name: str, tensor: Tensor, labels: Tensor) -> Tensor:
    """Return `tensor` if it has the shape of `labels`.

    Args:
        name: name of the tensor, for the error message.
        tensor: tensor to check.
        labels: tensor with the expected shape.

    Raises:
        DataError: if the shapes differ.
    """
    if tensor.shape != labels.shape:
        raise DataError(
            f"expected {name} of shape {list(labels.shape)}, like the labels; got {list(tensor.shape)}",
            where=name,
            remedy=f"pass {name} with one entry per label",
        )
    return tensor


def weights_like(labels: Tensor, weights: Tensor | None) -> Tensor:
    """Return the weights of labels in fp64; ones by default.

    Raises:
        DataError: if the weights do not have the shape of `labels`.
    """
    if weights is None:
        return torch.ones_like(labels, dtype=torch.float64)
    return check_shape("weights", weights, labels).to(torch.float64)
