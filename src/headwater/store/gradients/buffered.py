"""The sums of one rank, by stage: open while gradients are added to them, else in the gradient buffer."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Collection, Sequence
from typing import final

import torch

from headwater.core.stage import ParamKey, StageSpec
from headwater.store.gradients.buffer import GradientBuffer
from headwater.store.gradients.port import Gradients


@dataclasses.dataclass
class OpenStage:
    """A stage while gradients are added to it.

    Attributes:
        gradients: its sums; they are not in the buffer meanwhile.
        received: indices of the parameters that have received a gradient since the stage was opened.
    """

    gradients: Gradients
    received: set[int] = dataclasses.field(default_factory=set)


@final
class BufferedSums:
    """The sums of one rank, and which of them are lent to the user's loop or saved for an undo.

    Args:
        stages: the stages.
        buffer: holds the sums of stages that are not open.
    """

    def __init__(self, stages: Sequence[StageSpec], buffer: GradientBuffer) -> None:
        self._stages = stages
        self._buffer = buffer
        self._open: dict[int, OpenStage] = {}
        self._lent: dict[ParamKey, torch.Tensor] = {}
        self._undoable: frozenset[int] = frozenset()  # stages that must be saved before a sum of them changes
        self._saved: set[int] = set()  # those of them that are saved

    def open(self, stage: int) -> OpenStage:
        """Return a stage, opened if it is not open, to change its sums."""
        if stage not in self._open:
            # Before the sums are taken out of the buffer.
            self.save(stage)
            self._return_lent(stage)
            held = self._buffer.take(stage)
            self._open[stage] = OpenStage(held or [None] * len(self._stages[stage].params))
        return self._open[stage]

    def settle(self, stage: int) -> None:
        """Put the sums of a stage into the buffer if it is open."""
        opened = self._open.pop(stage, None)
        if opened is not None:
            self._buffer.put(stage, opened.gradients)

    def settle_all(self) -> None:
        """Put the sums of all open stages into the buffer."""
        for stage in sorted(self._open):
            self.settle(stage)

    def look(self, stage: int) -> Gradients:
        """Return the sums of a stage that is not open, with the changes that the user's loop has made."""
        self._return_lent(stage)
        return self._buffer.look(stage)

    def take(self, stage: int) -> Gradients | None:
        """Remove and return all sums of a stage."""
        self.settle(stage)
        self._return_lent(stage)
        return self._buffer.take(stage)

    def put(self, stage: int, gradients: Gradients) -> None:
        """Hold sums that `take` has returned."""
        self._buffer.put(stage, gradients)

    def drop(self, key: ParamKey) -> None:
        """Drop the sum of one parameter."""
        stage, param = key
        self.save(stage)
        self.settle(stage)
        self._lent.pop(key, None)
        self._buffer.drop(stage, param)

    # sums that are lent

    def lend(self, key: ParamKey, present: Collection[ParamKey]) -> torch.Tensor:
        """Return the sum of one parameter, which may be changed in place until `end_loan`.

        Args:
            key: the parameter.
            present: the sums that may be lent.
        """
        stage, param = key
        if key not in self._lent:
            self.save(stage)
            self.settle(stage)
            held = self._buffer.look(stage)
            if self._buffer.is_memory:
                if stage in self._saved:  # the saved tensor must stay as it is
                    held[param] = _copy(held[param])
                lent = {param: held[param]}
            else:  # a file is read once for all its parameters
                lent = {index: total for index, total in enumerate(held) if (stage, index) in present}
            for index, total in lent.items():
                if total is not None:
                    self._lent.setdefault((stage, index), total.detach())
        return self._lent[key]

    def is_lent(self, key: ParamKey) -> bool:
        """True if the sum may have been changed by a caller of `lend`."""
        return key in self._lent

    def stop_lending(self, key: ParamKey) -> None:
        """Forget that a sum was lent, because another one replaces it."""
        self._lent.pop(key, None)

    def end_loan(self, key: ParamKey) -> None:
        """End a loan: from now on the lent tensor is not the sum itself."""
        stage, param = key
        self._return_lent(stage)
        if key in self._lent:
            # Weak: if the loop has dropped the tensor, the copy below is saved.
            lent = weakref.ref(self._lent.pop(key))
            if lent() is not None:  # the user's loop still has it, and the update changes the sum in place
                held = self._buffer.look(stage)
                held[param] = _copy(held[param])

    def _return_lent(self, stage: int) -> None:
        """Write lent copies back to the buffer. A buffer in memory has lent its own tensors, not copies."""
        if self._buffer.is_memory:
            return
        keys = [(stage, param) for param in range(len(self._stages[stage].params))]
        lent = {key[1]: self._lent.pop(key) for key in keys if key in self._lent}
        if lent:
            held = self._buffer.take(stage) or []
            self._buffer.put(stage, [lent.get(param, total) for param, total in enumerate(held)])

    # a step that may have to be undone

    def begin_undoable(self, stages: Collection[int]) -> None:
        """Save the sums of these stages before they change, until `forget`."""
        self._undoable = frozenset(stages)

    def is_saved(self, stage: int) -> bool:
        """True if the sums of a stage are saved, so that tensors which were there must not be changed."""
        return stage in self._saved

    def save(self, stage: int) -> None:
        """Save the sums of a stage for `restore`, before one of them changes; once, if an undo needs it."""
        if stage in self._undoable and stage not in self._saved:
            self.settle(stage)
            self._return_lent(stage)
            self._buffer.keep(stage)
            self._saved.add(stage)  # at last: `restore` must not look for sums that a full disk has refused

    def restore(self, keys: Collection[ParamKey]) -> None:
        """Hold the saved sums again, and of all sums only these."""
        for stage in self._saved:
            self._buffer.restore(stage)
        for spec in self._stages:
            for param in range(len(spec.params)):
                if (spec.index, param) not in keys:
                    self._buffer.drop(spec.index, param)
        # Tensors that the loop still has belong to the step that was undone.
        self._lent.clear()

    def forget(self) -> None:
        """Discard the sums saved for an undo."""
        self._undoable = frozenset()
        self._saved.clear()
        self._buffer.forget()

    def close(self) -> None:
        """Release memory and files."""
        self._lent.clear()
        self._buffer.close()


def _copy(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return None if gradient is None else gradient.clone()
