"""The updates that have been committed: which wait for their stage, and which can still be undone."""

from __future__ import annotations

from collections.abc import Mapping

from headwater.core.stage import ParamKey
from headwater.store.update import Part, Pending


class Ledger:
    """Commits, by number, and what of them is left to do.

    Each stage's entries are changed by the thread that has the stage, but for those of a commit.

    Attributes:
        num_commits: updates committed so far; the first has number 1.
    """

    def __init__(self) -> None:
        self.num_commits = 0
        self._pending: dict[int, Pending] = {}
        self._mark = 0  # number of commits when the transaction began
        self._taken: dict[ParamKey, int] = {}  # by which of them since then
        self._last_used = 0  # the newest with which a stage was used, or was to be

    def __contains__(self, stage: int) -> bool:
        return stage in self._pending

    @property
    def stages(self) -> list[int]:
        """Those that an update waits for."""
        return list(self._pending)

    def add(self, stage: int, parts: Mapping[int, Part]) -> None:
        """An update waits for a stage: all parts of the commit at once, so that nobody finds half of it.

        Two optimizers may share a stage: then the later commit joins the earlier one.
        """
        pending = self._pending.get(stage)
        earlier = {} if pending is None else pending.parts
        assert not earlier.keys() & parts.keys(), "a new gradient has made the older update happen"
        self._pending[stage] = Pending(self.num_commits, {**earlier, **parts})

    def take_gradient(self, key: ParamKey) -> None:
        """The newest commit has the gradient of a parameter."""
        self._taken[key] = self.num_commits

    def due(self, stage: int, up_to: int | None = None) -> Pending | None:
        """The update that waits for a stage, unless it was committed after number `up_to`."""
        pending = self._pending.get(stage)
        return None if pending is None or (up_to is not None and pending.number > up_to) else pending

    def apply(self, stage: int) -> Pending:
        """The update that waits for a stage, which is applied now: it cannot be undone any more."""
        pending = self._pending.pop(stage)
        self.note_used(pending.number)
        return pending

    def note_used(self, number: int) -> None:
        """Weights are used with this commit: neither it nor one before it can be undone any more."""
        self._last_used = max(self._last_used, number)

    def forget(self, stage: int) -> None:
        """The stage is replaced: nothing waits for it."""
        self._pending.pop(stage, None)

    # steps that may have to be undone

    def begin(self) -> None:
        """From now on what comes may be undone."""
        self._mark = self.num_commits
        self._taken.clear()

    @property
    def has_commits(self) -> bool:
        """Whether anything was committed since `begin`."""
        return self.num_commits > self._mark

    def keep_all(self) -> None:
        """What was committed up to now cannot be undone."""
        self._mark = -1

    @property
    def last_kept(self) -> int:
        """The newest commit that cannot be undone: a stage was used with it, or it is older than `begin`."""
        return max(self._mark, self._last_used)

    def undo(self, stage: int, last: int) -> int | None:
        """Drop what waits for a stage and was committed after number `last`.

        Returns:
            The number of what waited, if nothing of it is left.
        """
        pending = self._pending.pop(stage, None)
        if pending is None:
            return None
        kept = {param: part for param, part in pending.parts.items() if part.number <= last}
        if not kept:
            return pending.number
        self._pending[stage] = Pending(pending.number, kept)  # others wait for that number
        return None

    def is_undone(self, last: int) -> bool:
        """Whether nothing since `begin` is left if all after number `last` was undone."""
        return last == self._mark

    def taken(self, last: int) -> set[ParamKey]:
        """Parameters whose gradients went into commits since `begin`, up to number `last`."""
        return {key for key, number in self._taken.items() if number <= last}

    def waiting(self) -> set[ParamKey]:
        """Parameters that an update waits for."""
        return {(stage, param) for stage, pending in self._pending.items() for param in pending.parts}
