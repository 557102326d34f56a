"""The update of one stage: fetches gradients, bytes and optimizer scalars, and runs the optimizer."""

from __future__ import annotations

from typing import final

import torch

from headwater.core.recorder import RECORDER, UPDATE
from headwater.store.gradients.port import GradientSink
from headwater.store.ownership import Ownership
from headwater.store.rules import UpdateRules
from headwater.store.scalars import OptimizerScalars
from headwater.store.tier import Tier
from headwater.store.update import Pending
from headwater.store.updater import Updater


@final
class StageUpdate:
    """Updates this rank's pieces of a stage. `StageAccess` calls it with the stage's lock held.

    Args:
        rule: how parameters are updated.
        tier: where the bytes lie.
        ownership: which rank updates which pieces.
        gradients: the sums that updates use.
        scalars: of the optimizer.
    """

    def __init__(
        self,
        rule: UpdateRules,
        tier: Tier,
        ownership: Ownership,
        gradients: GradientSink,
        scalars: OptimizerScalars,
    ) -> None:
        self._updater = Updater(rule)
        self._tier = tier
        self._ownership = ownership
        self._gradients = gradients
        self._scalars = scalars

    def apply(self, stage: int, pending: Pending, buffer: torch.Tensor | None) -> None:
        """Apply a pending update to this rank's pieces of a stage.

        Args:
            stage: the stage.
            pending: the update of each parameter.
            buffer: page-aligned memory for the wire image; it holds this host's part of the new image
                afterwards. Not used where the image is resident.
        """
        layout = self._tier.layouts[stage]
        with RECORDER.span(UPDATE, layout.stage.name, layout.wire_bytes + layout.rest_bytes):
            self._apply(stage, pending, buffer)

    def _apply(self, stage: int, pending: Pending, buffer: torch.Tensor | None) -> None:
        # Inside the torn section: gradients that are taken here cannot be used again.
        gradients = self._gradients.take(stage)
        assert gradients is not None, f"an update of stage {stage} was committed without gradients"
        own = self._ownership.own_bytes(stage)
        with self._tier.wire(stage, buffer, write=True, part=own) as image:
            groups = self._tier.groups(stage, self._ownership.own_groups(stage), write=True)
            scalars = self._updater.apply(
                self._tier.layouts[stage].stage,
                image,
                groups,
                gradients,
                self._scalars.by_stage[stage],
                pending,
            )
            self._scalars.by_stage[stage] = scalars
        for param in pending.parts:
            gradients[param] = None  # also where another rank has updated the last piece
        self._gradients.put_back(stage, gradients)  # those of parameters that the commit did not name
