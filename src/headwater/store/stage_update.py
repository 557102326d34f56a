"""The update of one stage: fetches gradients, bytes and optimizer scalars, and runs the optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, final

import torch

from headwater.core.device_memory import is_out_of_memory
from headwater.core.errors import DeviceFullError
from headwater.core.recorder import RECORDER, UPDATE
from headwater.store.gradients.port import Gradients, GradientSink
from headwater.store.layout import Group
from headwater.store.ownership import Ownership
from headwater.store.scalars import OptimizerScalars
from headwater.store.tier import Tier, all_pages
from headwater.store.update import Pending, Progress

if TYPE_CHECKING:
    from headwater.store.updater import Updater

_Bytes = tuple[torch.Tensor, Iterable[tuple[Group, torch.Tensor]], Gradients]
"""A wire image, groups with their bytes, and the gradients of the parameters."""


@final
class StageUpdate:
    """Updates this rank's pieces of a stage. `StageAccess` calls it with the stage's lock held.

    Args:
        updater: runs the optimizer.
        tier: where the bytes lie.
        ownership: which rank updates which pieces.
        gradients: the sums that updates use.
        scalars: the scalars of the optimizer.
    """

    def __init__(
        self,
        updater: Updater,
        tier: Tier,
        ownership: Ownership,
        gradients: GradientSink,
        scalars: OptimizerScalars,
    ) -> None:
        self._updater = updater
        self._tier = tier
        self._ownership = ownership
        self._gradients = gradients
        self._scalars = scalars
        self._unfinished: dict[int, Progress] = {}  # by stage, updates for which memory was missing

    def close(self) -> None:
        """Free memory that the calling thread has used."""
        self._unfinished.clear()
        self._updater.close()

    def forget(self, stage: int) -> None:
        """Forget the progress of a stage's update. Called when all values of the stage are replaced."""
        self._unfinished.pop(stage, None)

    def apply(self, stage: int, pending: Pending, buffer: torch.Tensor | None) -> None:
        """Apply a pending update to this rank's pieces of a stage.

        Args:
            stage: the stage.
            pending: the update of each parameter.
            buffer: page-aligned memory for the wire image; it holds this host's part of the new image
                afterwards. Not used where the image is in memory.

        Raises:
            DeviceFullError: if the stage is in device memory, and memory is missing for its update. The next
                call continues the update.
        """
        layout = self._tier.layouts[stage]
        with RECORDER.span(UPDATE, layout.stage.name, layout.wire_bytes + layout.rest_bytes):
            self._apply(stage, pending, buffer)

    def _apply(self, stage: int, pending: Pending, buffer: torch.Tensor | None) -> None:
        # The stage is marked as torn here: gradients that are taken cannot be taken again after an error.
        gradients = self._gradients.take(stage)
        assert gradients is not None, f"an update of stage {stage} was committed without gradients"
        layout, before = self._tier.layouts[stage], self._scalars.by_stage[stage]
        on_device = self._tier.on_device(stage) is not None
        progress = self._unfinished.pop(stage, None) or Progress.of(before, undoable=on_device)
        received = gradients
        try:
            with self._bytes_of(stage, gradients, buffer) as (image, groups, received):
                self._updater.apply(layout, image, groups, received, before, pending, progress)
        except RuntimeError as error:
            if not (on_device and is_out_of_memory(error)):
                raise
            self._gradients.put_back(stage, _unused(gradients, received))
            self._unfinished[stage] = progress
            raise _without_memory(layout.stage.name, pending, error) from error
        self._scalars.by_stage[stage] = progress.after
        for param in pending.parts:
            gradients[param] = None  # `Updater` has not done so if another rank updates the last piece
        self._gradients.put_back(stage, gradients)  # gradients that the commit does not use

    @contextmanager
    def _bytes_of(self, stage: int, gradients: Gradients, buffer: torch.Tensor | None) -> Iterator[_Bytes]:
        """Yield the wire image, this rank's groups and the gradients of a stage, which the update changes.

        They are on the device on which the update runs.
        """
        device = self._tier.on_device(stage)
        if device is not None:  # every rank updates all of it
            whole = self._tier.layouts[stage].whole
            with device.received(gradients) as received, device.changing():
                yield device.wire, [(whole, device.bytes_of(whole))], received
            return
        own, part = self._ownership.own_groups(stage), self._ownership.own_bytes(stage)
        with self._tier.wire(stage, buffer, write=True, part=part) as image:
            yield image, self._tier.groups(stage, own, write=all_pages), gradients


def _unused(gradients: Gradients, received: Gradients) -> Gradients:
    """Return the gradients that an update has not used: it sets used ones to `None` in `received`."""
    pairs = zip(gradients, received, strict=True)
    return [None if copy is None else gradient for gradient, copy in pairs]


def _without_memory(stage: str, pending: Pending, error: RuntimeError) -> DeviceFullError:
    step = max(part.update.step for part in pending.parts.values())
    reason = (str(error).splitlines() or ["no reason was given"])[0]
    return DeviceFullError(
        f"the GPU has no memory left for the update of step {step}: {reason}",
        where=f"stage {stage!r}",
        remedy="end other processes that use the GPU, or resume with a smaller device_memory; "
        f"step {step} is committed, and the next use of the stage completes its update; "
        "a step that was running was not applied",
    )
