"""The gradient sums of one rank, by stage. A stage is open while gradients are added to its sums."""

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
    """The gradient sums of a stage while gradients are added to them.

    Attributes:
        gradients: its sums; they are not in the buffer meanwhile.
        received: indices of the parameters that have received a gradient since the stage was opened.
    """

    gradients: Gradients
    received: set[int] = dataclasses.field(default_factory=set)


@final
class BufferedSums:
    """The gradient sums of one rank. Some may be lent to the user's loop, or saved for an undo.

    Args:
        stages: the stages.
        buffer: holds the sums of stages that are not open.
    """

    def __init__(self, stages: Sequence[StageSpec], buffer: GradientBuffer) -> None:
        self._stages = stages
        self._buffer = buffer
        self._open: dict[int, OpenStage] = {}
        self._lent: dict[ParamKey, torch.Tensor] = {}
        self._returned: set[ParamKey] = set()  # sums in files that were lent, and written back
        self._undoable: frozenset[int] = frozenset()  # stages that must be saved before a sum of them changes
        self._saved: set[int] = set()  # the stages in `_undoable` whose sums are saved

    def open(self, stage: int) -> OpenStage:
        """Open a stage, if it is not open, and return it. The caller may change its sums."""
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
        """Return the sums of a stage that is not open, including the changes by the user's loop."""
        self._return_lent(stage)
        return self._buffer.look(stage)

    def take(self, stage: int) -> Gradients | None:
        """Remove and return all sums of a stage, or `None` if nothing was added for it."""
        self.settle(stage)
        self._return_lent(stage)
        return self._buffer.take(stage)

    def put(self, stage: int, gradients: Gradients) -> None:
        """Put sums that `take` has returned into the buffer."""
        self._buffer.put(stage, gradients)

    def drop(self, key: ParamKey) -> None:
        """Discard the sum of one parameter."""
        stage, param = key
        self.save(stage)
        self.settle(stage)
        self._lent.pop(key, None)
        self._returned.discard(key)
        self._buffer.drop(stage, param)

    # sums that are lent

    def lend(self, key: ParamKey, present: Collection[ParamKey]) -> torch.Tensor:
        """Return the sum of one parameter. The caller may change the tensor in place until `end_loan`.

        Args:
            key: the parameter.
            present: the sums that may be lent.
        """
        stage, param = key
        if key not in self._lent:
            self.save(stage)
            self.settle(stage)
            held = self._buffer.look(stage)
            if self._buffer.is_memory(stage):
                if stage in self._saved:  # the saved tensor must stay as it is
                    held[param] = _copy(held[param])
                lent = {param: held[param]}
            else:  # a file is read once for all its parameters
                lent = {index: total for index, total in enumerate(held) if (stage, index) in present}
            for index, total in lent.items():
                if total is not None:
                    self._lent.setdefault((stage, index), total.detach())
        return self._lent[key]

    def was_lent(self, key: ParamKey) -> bool:
        """True if the sum of a parameter is lent or was: the caller of `lend` may have changed it."""
        return key in self._lent or key in self._returned

    def stop_lending(self, key: ParamKey) -> None:
        """Forget that a sum was lent. Called when another tensor replaces the sum."""
        self._lent.pop(key, None)
        self._returned.discard(key)

    def end_loan(self, key: ParamKey) -> None:
        """End a loan: later changes of the lent tensor do not change the sum, and the reverse."""
        stage, param = key
        self._return_lent(stage)
        if key in self._lent:
            # Weak: if the user's loop no longer has the tensor, no copy is needed.
            lent = weakref.ref(self._lent.pop(key))
            mine = lent()
            if mine is not None:  # the user's loop still has it, and may change it before the update
                self._lent[key] = mine  # until the copy is made, which may fail for lack of memory
                held = self._buffer.look(stage)
                held[param] = _copy(held[param])
                del self._lent[key]
        self._returned.discard(key)

    def _return_lent(self, stage: int) -> None:
        """Write lent copies back to the buffer. A buffer in memory has lent its own tensors, not copies."""
        if self._buffer.is_memory(stage):
            return
        keys = [(stage, param) for param in range(len(self._stages[stage].params))]
        lent = {key[1]: self._lent.pop(key) for key in keys if key in self._lent}
        if lent:
            self._returned.update((stage, param) for param in lent)
            held = self._buffer.take(stage) or []
            self._buffer.put(stage, [lent.get(param, total) for param, total in enumerate(held)])

    # a step that may have to be undone

    def begin_undoable(self, stages: Collection[int]) -> None:
        """From now until `forget`, save the sums of these stages before they change."""
        self._undoable = frozenset(stages)

    def is_saved(self, stage: int) -> bool:
        """True if the sums of a stage are saved. The saved tensors must not be changed in place."""
        return stage in self._saved

    def save(self, stage: int) -> None:
        """Save the sums of a stage for `restore`. Do nothing if they are saved, or if no undo needs them."""
        if stage in self._undoable and stage not in self._saved:
            self.settle(stage)
            self._return_lent(stage)
            self._buffer.keep(stage)
            self._saved.add(stage)  # last: `restore` must not look for sums that could not be saved

    def restore(self, keys: Collection[ParamKey]) -> None:
        """Bring back the saved sums, then discard all sums that are not in `keys`."""
        for stage in self._saved:
            self._buffer.restore(stage)
        for spec in self._stages:
            for param in range(len(spec.params)):
                if (spec.index, param) not in keys:
                    self._buffer.drop(spec.index, param)
        # Tensors that the loop still has belong to the step that was undone.
        self._lent.clear()
        self._returned.clear()

    def forget(self) -> None:
        """Discard the sums saved for an undo."""
        self._undoable = frozenset()
        self._saved.clear()
        self._buffer.forget()

    def close(self) -> None:
        """Release memory and files."""
        self._lent.clear()
        self._open.clear()
        self._buffer.close()


def _copy(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return None if gradient is None else gradient.clone()
