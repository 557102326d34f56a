"""Optimizer scalars, such as step counts: the optimizer state that each rank keeps in its own memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch

from headwater.core.stage import ParamKey, StageSpec
from headwater.fabric.fabric import Fabric
from headwater.store.layout import Scalars
from headwater.store.ownership import Ownership

_SCALARS_BY_KEY = dict[ParamKey, dict[str, torch.Tensor | bool | int | float | str | None] | None]
"""The type of messages in which ranks exchange scalars: parameter -> its scalars."""


@final
class OptimizerScalars:
    """The optimizer scalars (such as step counts) of the parameters that this rank updates.

    Attributes:
        by_stage: by stage and parameter, the scalars after the last applied update.

    Args:
        stages: the stages.
        ownership: which rank updates which pieces.
        fabric: the ranks.
    """

    def __init__(self, stages: Sequence[StageSpec], ownership: Ownership, fabric: Fabric) -> None:
        self._stages = stages
        self._ownership = ownership
        self._fabric = fabric
        self.by_stage: list[list[Scalars | None]] = [[None] * len(stage.params) for stage in stages]

    def share(self) -> None:
        """Copy all scalars to all ranks. All ranks call this together, after all updates are applied."""
        mine = {
            (stage.index, index): self.by_stage[stage.index][index]
            for stage in self._stages
            for index in range(len(stage.params))
            # One rank sends the scalars of a parameter: the owners of its other pieces have the same.
            if self._ownership.is_first_of_mine(stage.index, index)
        }
        for scalars in self._fabric.gather_objects(mine, _SCALARS_BY_KEY, "the state of an optimizer"):
            for (stage, param), value in scalars.items():
                self.by_stage[stage][param] = value
