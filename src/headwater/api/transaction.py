"""A step as a transaction: whoever holds state that it changes takes part, and commits or goes back."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Protocol


class Participant(Protocol):
    """Holds state that steps change. Each `begin_step` is followed by one of the other two."""

    def begin_step(self) -> None:
        """Remember what there is to go back to."""

    def end_step(self) -> None:
        """Keep what the step did."""

    def abort_step(self) -> None:
        """Be as before `begin_step`."""


class _Transaction:
    """A step under way.

    Attributes:
        parts: who takes part; leaving it ends them, the last to join first. If one fails, those after it are
            aborted.
        when_committed: what is to happen then.
    """

    def __init__(self) -> None:
        self.parts = ExitStack()
        self.when_committed: list[Callable[[], object]] = []

    def join(self, participant: Participant) -> None:
        self.parts.enter_context(_part(participant))


@contextmanager
def _part(participant: Participant) -> Iterator[None]:
    participant.begin_step()
    try:
        yield
    except BaseException:  # KeyboardInterrupt too must undo the step; raised again below
        participant.abort_step()
        raise
    participant.end_step()


@contextmanager
def _finally(action: Callable[[], object]) -> Iterator[None]:
    try:
        yield
    finally:  # those before it may have failed
        action()


_participants: weakref.WeakValueDictionary[int, Participant] = weakref.WeakValueDictionary()  # oldest first
_current: _Transaction | None = None


def register(participant: Participant, *, undone_last: bool = False) -> None:
    """Let it take part in every step for as long as it lives, from the one on that is under way.

    Args:
        participant: holds the state.
        undone_last: where a step is undone, those that are registered already are so before it.
    """
    if id(participant) in _participants:
        return
    others = list(_participants.items()) if undone_last else []
    for key, _ in others:
        del _participants[key]
    _participants[id(participant)] = participant
    _participants.update(others)
    if _current is not None:
        _current.join(participant)


def unregister(participant: Participant) -> None:
    """Leave it out of the steps that begin from now on."""
    _participants.pop(id(participant), None)


def is_open() -> bool:
    """Whether a step is under way."""
    return _current is not None


def when_committed(action: Callable[[], object]) -> None:
    """Call `action` when the step under way is committed, never if it is aborted; at once if there is none.

    An action that fails neither undoes the step nor keeps other actions from happening.
    """
    if _current is None:
        action()
    else:
        _current.when_committed.append(action)


@contextmanager
def transaction() -> Iterator[None]:
    """Within it every participant's changes belong together: kept at its end, undone by an exception.

    A transaction within another is part of the outer one.
    """
    global _current
    if _current is not None:
        yield
        return
    step = _current = _Transaction()
    try:
        with step.parts:
            for participant in list(_participants.values()):
                step.join(participant)
            yield
    finally:
        _current = None
    with ExitStack() as stack:
        for action in reversed(step.when_committed):
            stack.enter_context(_finally(action))
