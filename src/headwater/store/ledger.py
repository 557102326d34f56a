"""The ledger of commits: which updates are pending, and which commits can still be undone. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import final

from headwater.core.stage import ParamKey
from headwater.store.update import Part, Pending


@final
class Ledger:
    """Counts the commits of a store, and lists pending updates by stage.

    The entries of a stage are changed only under the stage's lock; `add`, from a commit, is the exception.

    Attributes:
        num_commits: updates committed so far; the first has number 1.
    """

    def __init__(self) -> None:
        self.num_commits = 0
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
        """Add what a commit updates in a stage to the pending updates, atomically.

        Two optimizers may share a stage: then the later commit joins the earlier one.

        Args:
            stage: the stage.
            parts: the update of each parameter.
            number: of the commit: the newest one, or the one that the running step will make.
        """
        pending = self._pending.get(stage)
        earlier = {} if pending is None else pending.parts
        # A part that was replaced here would be a lost step.
        assert not earlier.keys() & parts.keys(), "a new gradient has made the older update happen"
        self._pending[stage] = Pending(number, {**earlier, **parts})

    def take_gradients(self, keys: Iterable[ParamKey]) -> None:
        """Record that the newest commit has taken the gradients of these parameters."""
        self._taken.update(dict.fromkeys(keys, self.num_commits))

    def due(self, stage: int, up_to: int | None = None) -> Pending | None:
        """Return the pending update of a stage, or `None`. An update committed after `up_to` is left out."""
        pending = self._pending.get(stage)
        return None if pending is None or (up_to is not None and pending.number > up_to) else pending

    def apply(self, stage: int) -> Pending:
        """Remove and return the pending update of a stage, for the caller to apply. It cannot be undone."""
        pending = self._pending.pop(stage)
        # The stage's former values are gone from now on.
        self.note_used(pending.number)
        return pending

    def postpone(self, stage: int, pending: Pending) -> None:
        """Put back the pending update that `apply` has returned, because the device had no memory for it."""
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

    def undo(self, stage: int, last: int) -> int | None:
        """Discard what commits after number `last` have added to the pending update of a stage.

        Returns:
            The number of the pending update if nothing is left of it; otherwise `None`.
        """
        pending = self._pending.pop(stage, None)
        if pending is None:
            return None
        kept = {param: part for param, part in pending.parts.items() if part.number <= last}
        if not kept:
            return pending.number
        self._pending[stage] = Pending(pending.number, kept)  # other ranks wait for this number
        return None

    def is_undone(self, last: int) -> bool:
        """True if undoing all commits after number `last` undoes every commit since `begin`."""
        return last == self._mark

    def taken(self, last: int) -> set[ParamKey]:
        """Return the parameters whose gradients were taken by commits since `begin`, up to number `last`."""
        return {key for key, number in self._taken.items() if number <= last}

    def waiting(self) -> set[ParamKey]:
        """Return the parameters with a pending update."""
        # A list first: another thread may apply an update meanwhile.
        pending = list(self._pending.items())
        return {(stage, param) for stage, update in pending for param in update.parts}
