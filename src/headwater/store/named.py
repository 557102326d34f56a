"""The parameters of a store by name."""

from __future__ import annotations

from headwater.store.gradients import ParamKey
from headwater.store.store import WeightStore


def keys_by_name(store: WeightStore) -> dict[str, ParamKey]:
    """Every parameter."""
    return {
        param.name: (stage.index, index) for stage in store.stages for index, param in enumerate(stage.params)
    }
