"""A check for changes of bound weights that torch does not count, such as those by `weight.data`.

[Note: unseen writes]
torch counts the changes of a tensor in place, but not those by `weight.data` or by a numpy array. A forward
that makes such a change only after the dry run loses it, because slabs are not written back, or makes it
twice, because its block runs again. To compare all weights in each forward would read all of them twice more.
So each forward compares one stage: the sums of its bytes, read as integers, before and after its module runs.
With N stages, a change in every forward is found within 2 N forwards.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Collection
from typing import final

import torch
from torch.utils._python_dispatch import _disable_current_modes

from headwater.core.buffers import round_up
from headwater.core.errors import StreamError
from headwater.core.stage import StageSpec
from headwater.core.streams import Event
from headwater.stream.device import Device

_WORD_BYTES = torch.int64.itemsize


@dataclasses.dataclass(frozen=True)
class _Finding:
    """The result of a check: the parameters of a stage that were changed, as flags on the device.

    Attributes:
        spec: the stage.
        known: indices of the parameters that may be changed.
        changed: one flag for each parameter.
        computed: reached when the flags are computed.
    """

    spec: StageSpec
    known: Collection[int]
    changed: torch.Tensor
    computed: Event


@final
class UnseenWrites:
    """Finds weights that a forward changes without a count; see [Note: unseen writes].

    On a GPU the error is raised by a later forward, because this thread does not wait for the flags.

    Attributes:
        stages: indices of the stages that are checked in turn.

    Args:
        device: the device that has the weights while they are bound.
    """

    def __init__(self, device: Device) -> None:
        self._compute = device.compute
        self._copies = device.new_stream()
        self.stages: list[int] = []
        self._left: list[int] = []  # stages that this round has not checked yet
        self._due: int | None = None
        self._before: tuple[torch.Tensor, torch.Tensor] | None = None  # the image, and the sums of its parts
        self._finding: _Finding | None = None
        # In an order that changes: a forward may change weights in every tenth call only.
        self._random = random.Random(0)

    def next_forward(self, *, trains: bool) -> None:
        """Choose the stage that the next forward checks; none if gradients are disabled.

        Raises:
            StreamError: if an earlier forward has changed a weight.
        """
        self.raise_found()
        self._before = self._due = None
        # Generation reads each weight once in a call, so a check would take a large part of its time.
        if trains:
            if not self._left:
                self._left = self._random.sample(self.stages, len(self.stages))
            self._due = self._left.pop()

    def begin(self, spec: StageSpec, image: torch.Tensor) -> None:
        """Compute the sums of a stage that was bound to `image`, if it is the stage to check."""
        # If a finding still waits for the device, this check is left out.
        if spec.index == self._due and self._finding is None:
            self._before = image, _sums(spec, image)

    def end(self, spec: StageSpec, known: Collection[int]) -> None:
        """Compare the sums of a stage that is about to be unbound.

        Args:
            spec: the stage.
            known: indices of the parameters that the forward may change.
        """
        if spec.index == self._due and self._before is not None:
            (image, before), self._before = self._before, None
            self._finding = _Finding(spec, known, _sums(spec, image) != before, self._compute.record())

    def raise_found(self) -> None:
        """Raise if a check has found a change, and the device has computed its result.

        Raises:
            StreamError: names the changed weights.
        """
        found = self._finding
        if found is None or not found.computed.query():
            return
        self._finding = None
        found.computed.synchronize()  # already reached; it orders the copy after the computation
        with _disable_current_modes():
            changed = torch.empty_like(found.changed, device="cpu")
            self._copies.copy(changed, found.changed)
            self._copies.record().synchronize()
            flags = changed.tolist()
        names = [
            param.name
            for index, param in enumerate(found.spec.params)
            if flags[index] and index not in found.known
        ]
        if names:
            raise StreamError(
                f"the forward changes {', '.join(names)} by .data or numpy, but did not in the dry run: "
                "such a change is lost, or made twice",
                where=f"stage {found.spec.name!r}",
                remedy="change the weight between steps, or in the first forward in training mode too; or "
                "compute the changed weight without a write: torch.nn.utils.parametrize",
            )


def _sums(spec: StageSpec, image: torch.Tensor) -> torch.Tensor:
    """Return the sum of the bytes of each parameter in an image, as integers of eight bytes."""
    # The user's dispatch modes must not see these operators, and a dry run's modes would replace them.
    with _disable_current_modes(), torch.no_grad():
        ends = [
            begin + round_up(param.wire_bytes, _WORD_BYTES)
            for param, begin in zip(spec.params, spec.offsets, strict=True)
        ]
        words = [image[begin:end].view(torch.int64) for begin, end in zip(spec.offsets, ends, strict=True)]
        return torch.stack([each.sum() for each in words])
