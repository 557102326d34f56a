"""Parameters by name."""

from __future__ import annotations

from collections.abc import Sequence

from headwater.core.stage import ParamKey, StageSpec


def keys_by_name(stages: Sequence[StageSpec]) -> dict[str, ParamKey]:
    """Return the key of every parameter of the stages by its name."""
    return {param.name: (stage.index, index) for stage in stages for index, param in enumerate(stage.params)}
