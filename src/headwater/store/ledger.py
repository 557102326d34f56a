"""The ledger of commits: which updates wait for their stage, and which can still be undone. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

from headwater.core.stage import ParamKey
from headwater.store.update import Part, Pending


@final
class Ledger:
    """The commits of a store, by number, and which of their updates have still to be applied.

    The entries of a stage are changed only under the stage's lock; `add`, from a commit, is the exception.

    Attributes:
        num_commits: updates committed so far; the first has number 1.
    """

    def __init__(self) -> None:
        self.num_commits = 0
        self._pending: dict[int, Pending] = {}
        self._mark = 0  # number of commits when the transaction began
        self._taken: dict[ParamKey, int] = {}  # the commit since then that has taken the gradient
        self._last_used = 0  # the newest commit with which a stage was used, or was to be

    def __contains__(self, stage: int) -> bool:
        return stage in self._pending

    @property
    def stages(self) -> list[int]:
        """The stages for which an update waits."""
        return list(self._pending)

    def add(self, stage: int, parts: Mapping[int, Part]) -> None:
        """Queue all parts of the newest commit for a stage, at once, so that no thread finds half of them.

        Two optimizers may share a stage: then the later commit joins the earlier one.
        """
        pending = self._pending.get(stage)
        earlier = {} if pending is None else pending.parts
        # A part that was replaced here would be a lost step.
        assert not earlier.keys() & parts.keys(), "a new gradient has made the older update happen"
        self._pending[stage] = Pending(self.num_commits, {**earlier, **parts})

    def take_gradient(self, key: ParamKey) -> None:
        """Note that the newest commit has taken the gradient of a parameter."""
        self._taken[key] = self.num_commits

    def due(self, stage: int, up_to: int | None = None) -> Pending | None:
        """Return the update that waits for a stage, unless it was committed after number `up_to`."""
        pending = self._pending.get(stage)
        return None if pending is None or (up_to is not None and pending.number > up_to) else pending

    def apply(self, stage: int) -> Pending:
        """Return the update that waits for a stage. The caller applies it: it cannot be undone any more."""
        pending = self._pending.pop(stage)
        # The stage's former values are gone from now on.
        self.note_used(pending.number)
        return pending

    def note_used(self, number: int) -> None:
        """Note a use of weights with this commit applied: from now on no commit up to it can be undone."""
        self._last_used = max(self._last_used, number)

    def note_all_used(self) -> None:
        """Note that weights will be used with all commits: none of them can be undone any more."""
        self.note_used(self.num_commits)

    def forget(self, stage: int) -> None:
        """Drop the update that waits for a stage, because the stage is replaced."""
        self._pending.pop(stage, None)

    # steps that may have to be undone

    def begin(self) -> None:
        """Begin a transaction: commits from now on may be undone."""
        self._mark = self.num_commits
        self._taken.clear()

    @property
    def has_commits(self) -> bool:
        """True if anything was committed since `begin`."""
        return self.num_commits > self._mark

    def keep_all(self) -> None:
        """Note that no commit up to now can be undone."""
        self._mark = -1

    @property
    def last_kept(self) -> int:
        """The newest commit that cannot be undone: a stage was used with it, or it is older than `begin`."""
        return max(self._mark, self._last_used)

    def undo(self, stage: int, last: int) -> int | None:
        """Drop the parts of the update of a stage that were committed after number `last`.

        Returns:
            The number of the update, if nothing is left of it; otherwise `None`.
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
        """True if no commit since `begin` is left when all after number `last` are undone."""
        return last == self._mark

    def taken(self, last: int) -> set[ParamKey]:
        """Return the parameters whose gradients went into commits since `begin`, up to number `last`."""
        return {key for key, number in self._taken.items() if number <= last}

    def waiting(self) -> set[ParamKey]:
        """Return the parameters for which an update waits."""
        return {(stage, param) for stage, pending in self._pending.items() for param in pending.parts}
