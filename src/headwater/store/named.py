"""Look-up of a store's parameters by name."""

from __future__ import annotations

from collections.abc import Sequence

from headwater.core.stage import ParamKey, StageSpec


def keys_by_name(stages: Sequence[StageSpec]) -> dict[str, ParamKey]:
    """Return name -> key (stage, index in the stage) for every parameter of the stages."""
    return {param.name: (stage.index, index) for stage in stages for index, param in enumerate(stage.params)}
