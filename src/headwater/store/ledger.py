"""The ledger of commits: which updates are pending, and which commits can still be undone. No I/O."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Collection, Iterable, Mapping
from typing import final

from headwater.core.stage import ParamKey
from headwater.store.update import Part, Pending


@dataclasses.dataclass(frozen=True)
class Undone:
    """The result of `Ledger.undo`.

    Attributes:
        is_complete: true if every commit since `begin` is undone.
        keys: the parameters whose updates are undone.
        emptied: stage -> number of its update, for the stages that have no pending update any more.
        taken: the parameters whose gradients were taken by commits since `begin` that are not undone.
    """

    is_complete: bool
    keys: Collection[ParamKey]
    emptied: Mapping[int, int]
    taken: Collection[ParamKey]


@final
class Ledger:
    """Counts the commits of a store, and lists pending updates by stage.

    The entries of a stage are changed only under the stage's lock, except by `add` and `undo`. With several
    ranks these two must not wait for the lock: a thread that holds it may wait for another rank.

    Attributes:
        num_commits: updates committed so far; the first has number 1.
    """

    def __init__(self) -> None:
        self.num_commits = 0
        self._lock = threading.Lock()  # guards the entries; held only while one method changes them
        self._pending: dict[int, Pending] = {}
        self._mark = 0  # number of commits when the transaction began
        self._taken: dict[ParamKey, int] = {}  # the commit since then that has taken the gradient
        self._last_used = 0  # the newest commit whose weights were used, or will be

    def __contains__(self, stage: int) -> bool:
        return stage in self._pending

    @property
    def stages(self) -> list[int]:
        """The stages with a pending update."""
        return list(self._pending)

    def add(self, stage: int, parts: Mapping[int, Part], number: int) -> None:
        """Add a commit's update of a stage to the pending updates, atomically.

        Two optimizers may share a stage: then the update of the later commit is merged with the earlier one.

        Args:
            stage: the stage.
            parts: the update of each parameter.
            number: the number of the commit: the newest one, or the one that the running step will make.
        """
        with self._lock:
            pending = self._pending.get(stage)
            earlier = {} if pending is None else pending.parts
            # A part that was replaced here would be a lost step.
            assert not earlier.keys() & parts.keys(), "a new gradient first applies the older update"
            self._pending[stage] = Pending(number, {**earlier, **parts})

    def take_gradients(self, keys: Iterable[ParamKey]) -> None:
        """Record that the newest commit has taken the gradients of these parameters."""
        self._taken.update(dict.fromkeys(keys, self.num_commits))

    def due(self, stage: int, up_to: int | None = None) -> Pending | None:
        """Return the pending update of a stage, or `None`. An update committed after `up_to` is left out."""
        pending = self._pending.get(stage)
        return None if pending is None or (up_to is not None and pending.number > up_to) else pending

    def apply(self, stage: int) -> Pending | None:
        """Remove and return the pending update of a stage, for the caller to apply. It cannot be undone.

        Returns:
            The update, or `None` if it was undone since `due` returned it.
        """
        with self._lock:
            pending = self._pending.pop(stage, None)
            if pending is not None:
                # The stage's former values are gone from now on.
                self.note_used(pending.number)
        return pending

    def postpone(self, stage: int, pending: Pending) -> None:
        """Put back the pending update that `apply` has returned, because the device had no memory for it."""
        with self._lock:
            later = self._pending.get(stage)
            if later is not None:
                pending = Pending(later.number, {**pending.parts, **later.parts})
            self._pending[stage] = pending

    def note_used(self, number: int) -> None:
        """Record that weights were used with commit `number` applied. It and all before cannot be undone."""
        self._last_used = max(self._last_used, number)

    def note_all_used(self) -> None:
        """Record that weights will be used with all commits applied. None of them can be undone."""
        self.note_used(self.num_commits)

    def forget(self, stage: int) -> None:
        """Discard the pending update of a stage. Called when all values of the stage are replaced."""
        with self._lock:
            self._pending.pop(stage, None)

    # steps that may have to be undone

    def begin(self) -> None:
        """Begin a transaction: commits from now on may be undone."""
        self._mark = self.num_commits
        self._taken.clear()

    @property
    def has_commits(self) -> bool:
        """True if there was a commit since `begin`."""
        return self.num_commits > self._mark

    def keep_all(self) -> None:
        """Make all commits up to now permanent: `undo` does not reach them."""
        self._mark = -1

    @property
    def last_kept(self) -> int:
        """The number of the newest commit that cannot be undone: it was used, or is older than `begin`."""
        return max(self._mark, self._last_used)

    def undo(self) -> Undone:
        """Discard all pending updates of commits after number `last_kept`.

        This is atomic: if another thread applies one of these updates first, its commit stays in all stages.
        """
        keys: set[ParamKey] = set()
        emptied: dict[int, int] = {}
        with self._lock:
            last = self.last_kept
            for stage, pending in list(self._pending.items()):
                kept = {param: part for param, part in pending.parts.items() if part.number <= last}
                keys.update((stage, param) for param in pending.parts if param not in kept)
                if kept:
                    self._pending[stage] = Pending(pending.number, kept)  # other ranks wait for this number
                else:
                    del self._pending[stage]
                    emptied[stage] = pending.number
        taken = {key for key, number in self._taken.items() if number <= last}
        return Undone(last == self._mark, keys, emptied, taken)

    def waiting(self) -> set[ParamKey]:
        """Return the parameters with a pending update."""
        # The list is a copy, because another thread may apply an update meanwhile.
        pending = list(self._pending.items())
        return {(stage, param) for stage, update in pending for param in update.parts}
