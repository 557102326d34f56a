"""The base class of metrics: a name, states that add up over batches and ranks, and what weights mean."""

from __future__ import annotations

from typing import Any

import torch
import torchmetrics
from torch import Tensor

from headwater.core.errors import DataError


class Metric(torchmetrics.Metric):
    """A value that is gathered batch by batch.

    A subclass has `update`, which adds a batch to its states, and `compute`, which gives the value. It makes
    its states with `register_state`, in `__init__` or in a `reset` of its own.

    Everything that torchmetrics offers works: `persistent(True)` puts the states into the `state_dict`, and
    `compute` sums them over the processes of torch.distributed.

    Args:
        name: under which the value is reported; the name of the class if not given.
    """

    def __init__(self, name: str | None = None) -> None:
        super().__init__()
        self.name = name or type(self).__name__
        self.reset()

    def register_state(self, name: str, tensor: Tensor, persistent: bool = False) -> None:
        """Let the attribute `name` be a state that starts as `tensor`.

        Args:
            name: of the attribute.
            tensor: its value before the first batch.
            persistent: whether it belongs in the `state_dict`.
        """
        self.add_state(name, tensor, dist_reduce_fx="sum", persistent=persistent)
        self._update_count, self._computed = 0, None

    @property
    def num_updates(self) -> int:
        """Batches added since the last reset."""
        return self.update_count

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Add a batch; gives the value of all batches so far."""
        self.update(*args, **kwargs)
        return self.compute()


def check_shape(name: str, tensor: Tensor, labels: Tensor) -> Tensor:
    """`tensor`, which has the shape of `labels`.

    Raises:
        DataError: if it has not.
    """
    if tensor.shape != labels.shape:
        raise DataError(
            f"{name} have shape {list(tensor.shape)}, the labels {list(labels.shape)}",
            where=name,
            remedy=f"give {name} one entry for each label",
        )
    return tensor


def weights_like(labels: Tensor, weights: Tensor | None) -> Tensor:
    """`weights` in fp64, one for each label: ones where there are none; 0 leaves a label out.

    Raises:
        DataError: if their shape is another one.
    """
    if weights is None:
        return torch.ones_like(labels, dtype=torch.float64)
    return check_shape("weights", weights, labels).to(torch.float64)
