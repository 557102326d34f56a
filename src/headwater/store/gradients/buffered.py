"""The gradient sums of one rank, by stage. A stage is open while gradients are added to its sums.

[Note: lent gradients]
In plain PyTorch `p.grad` is one tensor: a loop may keep it, take views of it, give it other memory by
`p.grad.data = ...`, or assign another tensor, and later additions go to the same memory. So the tensor
that the loop got or assigned is used for the sum as long as the loop keeps it, or another tensor with its
memory. A commit ends the loan: the update gets a copy if the loop can still reach the memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import final

import torch

from headwater.core.stage import ParamKey, StageSpec
from headwater.store.gradients.buffer import GradientBuffer
from headwater.store.gradients.loans import Loans, filled, is_used_elsewhere
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

    Attributes:
        loans: the tensors that the loop got.

    Args:
        stages: the stages.
        buffer: holds the sums of stages that are not open.
    """

    def __init__(self, stages: Sequence[StageSpec], buffer: GradientBuffer) -> None:
        self._stages = stages
        self._buffer = buffer
        self._open: dict[int, OpenStage] = {}
        self._lent: dict[ParamKey, torch.Tensor] = {}
        self.loans = Loans()
        self._returned: set[ParamKey] = set()  # sums on disk that were lent, and written back since
        self._undoable: frozenset[int] = frozenset()  # stages that must be saved before a sum of them changes
        self._saved: set[int] = set()  # the stages in `_undoable` whose sums are saved

    def open(self, stage: int) -> OpenStage:
        """Open a stage, if it is not open, and return it. The caller may change its sums."""
        if stage not in self._open:
            # The sums are saved before they are taken out of the buffer.
            self.save(stage)
            self._return_lent(stage)
            sums = self._buffer.take(stage) or [None] * len(self._stages[stage].params)
            if self.loans.tensors:
                sums = [self.loans.in_loop_memory((stage, param), total) for param, total in enumerate(sums)]
            self._open[stage] = OpenStage(sums)
        return self._open[stage]

    def settle(self, stage: int) -> None:
        """Put the sums of a stage into the buffer if it is open."""
        opened = self._open.pop(stage, None)
        if opened is None:
            return
        self._buffer.put(stage, opened.gradients)
        for param, total in enumerate(opened.gradients if self.loans.tensors else ()):
            mine = None if total is None else self.loans.loop_tensor((stage, param), total)
            if mine is not None and total is not None and mine.data_ptr() == total.data_ptr():
                # The loop still has the tensor, and may change it.
                self.note_lent((stage, param), mine)

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
        self.stop_lending(key)
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
                if total is not None and (stage, index) not in self._lent:
                    mine = self.loans.loop_tensor((stage, index), total)
                    self.note_lent((stage, index), total.detach() if mine is None else filled(mine, total))
        return self._lent[key]

    def note_lent(self, key: ParamKey, lent: torch.Tensor) -> None:
        """Record the tensor by which the loop reads and changes a sum. Its values are those of the sum."""
        self._lent[key] = lent
        self.loans.note(key, lent)

    def may_change(self, key: ParamKey) -> bool:
        """True if a sum may be changed in place: it is not the tensor that is saved for an undo."""
        return key[0] not in self._saved or key in self._lent

    def was_lent(self, key: ParamKey) -> bool:
        """True if the sum of a parameter is lent or was: the caller of `lend` may have changed it."""
        return key in self._lent or key in self._returned

    def stop_lending(self, key: ParamKey) -> None:
        """Forget that a sum was lent. Called when another tensor replaces the sum."""
        self._lent.pop(key, None)
        if self.loans.tensors:
            self.loans.forget(key)
        self._returned.discard(key)

    def end_loan(self, key: ParamKey) -> None:
        """End a loan: later changes of the lent tensor do not change the sum, and the reverse."""
        stage, param = key
        self._return_lent(stage)
        if key in self._lent:
            held = self._buffer.look(stage)
            # This reference is dropped first, so that only the loop's own ones are left.
            del self._lent[key]
            mine = self.loans.last(key)
            if mine is not None or is_used_elsewhere(held[param]):
                alias = _alias(held[param])
                # The loan continues until the copy is made: if memory for it is missing, nothing changes.
                self._lent[key] = alias if mine is None else mine
                held[param] = _copy(held[param])
                # `loans.end` looks for references, so drop these: then only the loop's own ones are left.
                del self._lent[key], mine
                self.loans.end(stage, {param: alias})
        self._returned.discard(key)

    def _return_lent(self, stage: int) -> None:
        """Bring the loop's changes of a stage's lent tensors into the buffer.

        On disk, the tensors are written back and their loans end. In memory, the sums use the memory that the
        loop's tensors have now.
        """
        if not self._lent:
            return
        keys = [(stage, param) for param in range(len(self._stages[stage].params))]
        if self._buffer.is_memory(stage):
            held = self._buffer.look(stage)
            for key in keys if held else ():
                if key in self._lent:
                    # The loop may have given it other memory: `p.grad.data = ...`.
                    held[key[1]] = self._lent[key].detach()
            return
        lent = {key[1]: self._lent.pop(key) for key in keys if key in self._lent}
        if lent:
            self._returned.update((stage, param) for param in lent)
            held = self._buffer.take(stage) or []
            self._buffer.put(stage, [lent.get(param, total) for param, total in enumerate(held)])
            aliases = {param: total.detach() for param, total in lent.items()}
            del lent
            self.loans.end(stage, aliases)

    # a step that may have to be undone

    def begin_undoable(self, stages: Collection[int]) -> None:
        """From now until `forget`, save the sums of these stages before they change."""
        self._undoable = frozenset(stages)
        for stage in {stage for stage, _ in self._lent}:
            self.save(stage)  # the loop may change a lent sum at any time

    def save(self, stage: int) -> None:
        """Save the sums of a stage for `restore`. Do nothing if they are saved, or if no undo needs them."""
        if stage in self._undoable and stage not in self._saved:
            self.settle(stage)
            lent = {key: self._lent[key] for key in self._lent if key[0] == stage}
            self._return_lent(stage)
            held = self._buffer.look(stage) if self._buffer.is_memory(stage) else []
            mine = {param: held[param] for _, param in lent} if held else {}
            # Copies of these are saved, because the loop may change its tensors at any time.
            for param, total in mine.items():
                held[param] = _copy(total)
            self._buffer.keep(stage)
            for param, total in mine.items():
                held[param] = total
            self._lent.update(lent)
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
        self.loans.clear()
        self._returned.clear()

    def forget(self) -> None:
        """Discard the sums saved for an undo."""
        self._undoable = frozenset()
        self._saved.clear()
        self._buffer.forget()

    def close(self) -> None:
        """Release memory and files."""
        self._lent.clear()
        self.loans.clear()
        self._open.clear()
        self._buffer.close()


def _alias(gradient: torch.Tensor | None) -> torch.Tensor:
    assert gradient is not None, "a lent sum is present"
    return gradient.detach()


def _copy(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return None if gradient is None else gradient.clone()
