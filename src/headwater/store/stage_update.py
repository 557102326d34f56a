"""The update of one stage: fetches gradients, bytes and optimizer scalars, and runs the optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import final

import torch

from headwater.core.recorder import RECORDER, UPDATE
from headwater.store.gradients.port import GradientSink
from headwater.store.layout import Group
from headwater.store.ownership import Ownership
from headwater.store.rules import UpdateRules
from headwater.store.scalars import OptimizerScalars
from headwater.store.tier import Tier, all_pages
from headwater.store.update import Pending
from headwater.store.updater import Updater

_Bytes = tuple[torch.Tensor, Iterable[tuple[Group, torch.Tensor]]]
"""A wire image, and groups with their bytes."""


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
                afterwards. Not used where the image is in memory.
        """
        layout = self._tier.layouts[stage]
        with RECORDER.span(UPDATE, layout.stage.name, layout.wire_bytes + layout.rest_bytes):
            self._apply(stage, pending, buffer)

    def _apply(self, stage: int, pending: Pending, buffer: torch.Tensor | None) -> None:
        # Inside the torn section: gradients that are taken here cannot be used again.
        gradients = self._gradients.take(stage)
        assert gradients is not None, f"an update of stage {stage} was committed without gradients"
        with self._bytes_of(stage, buffer) as (image, groups):
            self._scalars.by_stage[stage] = self._updater.apply(
                self._tier.layouts[stage],
                image,
                groups,
                gradients,
                self._scalars.by_stage[stage],
                pending,
            )
        for param in pending.parts:
            gradients[param] = None  # also where another rank has updated the last piece
        self._gradients.put_back(stage, gradients)  # those of parameters that the commit did not name

    @contextmanager
    def _bytes_of(self, stage: int, buffer: torch.Tensor | None) -> Iterator[_Bytes]:
        """Yield the wire image and this rank's groups of a stage where its update runs, to be changed."""
        own = self._ownership.own_groups(stage)
        device = self._tier.on_device(stage)
        if device is not None:
            with device.changing():
                yield device.wire, ((group, device.bytes_of(group)) for group in own)
            return
        part = self._ownership.own_bytes(stage)
        with self._tier.wire(stage, buffer, write=True, part=part) as image:
            yield image, self._tier.groups(stage, own, write=all_pages)
