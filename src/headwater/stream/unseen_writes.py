"""A check for changes of bound weights that torch does not count, such as those by `weight.data`.

[Note: unseen writes]
torch counts the changes of a tensor in place, but not those by `weight.data` or by a numpy array. If a
forward makes such a change that it did not make in the dry run, the change is lost, because slabs are not
written back, or it is made twice, because the block runs again. A comparison of all weights in each forward
would read all of them two more times. So each step compares one stage: the sums of its bytes, read as
integers, before and after its module runs. A change in every step is found after about as many steps as the
model has stages. A change in few steps may stay unnoticed, and so may one that only moves elements within a
weight, because the sum stays the same.
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

    Args:
        device: the device that has the weights while they are bound.
    """

    def __init__(self, device: Device) -> None:
        self._compute = device.compute
        self._copies = device.new_stream()
        self._may_check = False  # whether this step still has its check
        self._seen: set[int] = set()  # stages that were bound in this step before its check
        self._checked: set[int] = set()
        self._before: tuple[int, torch.Tensor, torch.Tensor] | None = None  # stage, image, sums of its parts
        self._finding: _Finding | None = None
        self._random = random.Random(0)

    def next_step(self, *, trains: bool) -> None:
        """Begin a step; nothing is checked in it if gradients are disabled.

        Raises:
            StreamError: if an earlier step has changed a weight.
        """
        self.raise_found()
        # A new round has only these stages: other forwards may use other stages.
        if self._may_check and self._seen <= self._checked:
            self._checked -= self._seen
        self._before = None
        self._seen.clear()
        # Generation reads each weight once in a call, so a check would take a large part of its time.
        self._may_check = trains

    def begin(self, spec: StageSpec, image: torch.Tensor) -> None:
        """Compute the sums of a stage that was bound to `image`, if this step checks this stage."""
        # If a finding still waits for the device, nothing is checked.
        if not self._may_check or self._finding is not None:
            return
        self._seen.add(spec.index)
        # The order changes at random, because a forward may change weights in every tenth call only.
        if spec.index in self._checked or self._random.random() < 0.5:
            return
        self._may_check = False
        self._checked.add(spec.index)
        self._before = spec.index, image, _sums(spec, image)

    def end(self, spec: StageSpec, known: Collection[int]) -> None:
        """Compare the sums of a stage that is about to be unbound.

        Args:
            spec: the stage.
            known: indices of the parameters that the forward may change.
        """
        if self._before is None or self._before[0] != spec.index:
            return
        (_, image, before), self._before = self._before, None
        with _disable_current_modes():  # see `_sums`
            changed = _sums(spec, image) != before
        self._finding = _Finding(spec, known, changed, self._compute.record())

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
