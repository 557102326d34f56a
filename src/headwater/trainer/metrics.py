"""Metrics of a user's model: found wherever the model keeps them, and read as numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.utils._pytree import keystr, tree_flatten_with_path


@runtime_checkable
class Metric(Protocol):
    """What torchmetrics and `headwater.metrics` have in common."""

    @property
    def update_count(self) -> int:
        """Batches added since the last reset."""
        ...

    def reset(self) -> None:
        """Begin anew."""
        ...

    def compute(self) -> Any:
        """The value over all batches since the last reset."""
        ...


def find_metrics(owner: object) -> dict[str, Metric]:
    """The metrics in the attributes of `owner`, in lists, dictionaries and modules too, by name.

    A metric without a name of its own is called after the attribute.
    """
    found: dict[str, Metric] = {}
    for place, value in _objects(owner):
        if isinstance(value, Metric) and not any(value is metric for metric in found.values()):
            name = str(vars(value).get("name") or place)
            found[name if name not in found else place] = value
    return found


def _objects(owner: object) -> Iterator[tuple[str, object]]:
    leaves, _ = tree_flatten_with_path(vars(owner))
    for path, leaf in leaves:
        place = keystr(path).replace("']['", ".").strip("[']")
        if isinstance(leaf, nn.Module):
            yield from ((f"{place}.{name}".rstrip("."), module) for name, module in leaf.named_modules())
        else:
            yield place, leaf


def metric_values(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """What the metrics that have seen a batch say; one with several values gives one entry for each."""
    values: dict[str, float] = {}
    for name, metric in metrics.items():
        if metric.update_count:
            value = torch.as_tensor(metric.compute())
            flat = value.flatten().tolist()
            values |= {name: flat[0]} if value.dim() == 0 else {f"{name}/{i}": v for i, v in enumerate(flat)}
    return values
