"""Metrics of a user's model: found in its attributes, and read as numbers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from headwater.fabric.fabric import ALONE, Fabric


@runtime_checkable
class Metric(Protocol):
    """The interface that torchmetrics and `headwater.metrics` have in common."""

    @property
    def update_count(self) -> int:
        """Batches added since the last reset."""
        ...

    def reset(self) -> None:
        """Forget all batches."""
        ...

    def compute(self) -> Any:
        """Return the value over all batches since the last reset."""
        ...


def find_metrics(owner: object) -> dict[str, Metric]:
    """Return the metrics in the attributes of `owner`, also within lists, dictionaries and modules, by name.

    A metric without a name gets that of its attribute; equal names are numbered.
    """
    found: dict[str, Metric] = {}
    for attribute, value in vars(owner).items():
        for metric in _metrics_in(value):
            # `in` would use `==`, for which torchmetrics returns a new metric.
            if any(metric is known for known in found.values()):
                continue
            name = str(vars(metric).get("name") or attribute)
            same = sum(known.partition(":")[0] == name for known in found)
            found[f"{name}:{same + 1}" if same else name] = metric
    return found


def _metrics_in(value: object) -> Iterator[Metric]:
    for leaf in tree_leaves(value):
        for candidate in leaf.modules() if isinstance(leaf, nn.Module) else (leaf,):
            if isinstance(candidate, Metric):
                yield candidate


def metric_values(metrics: Mapping[str, Metric], fabric: Fabric = ALONE) -> dict[str, float]:
    """Return the values of the metrics that have seen a batch. A metric may have several values.

    Args:
        metrics: by name.
        fabric: the ranks among which the batches were divided.
    """
    values: dict[str, float] = {}
    for name, metric in metrics.items():
        # All ranks must make the same choice: in `compute` torchmetrics exchanges the states of all ranks.
        if any(fabric.gather(metric.update_count)):
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "The ``compute`` method")  # this rank may have no batch
                value = torch.as_tensor(metric.compute(), device="cpu")
            flat = value.flatten().tolist()
            values |= {name: flat[0]} if value.dim() == 0 else {f"{name}/{i}": v for i, v in enumerate(flat)}
    return values
