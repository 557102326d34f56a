"""Steps as transactions: models, optimizers and scalers keep all changes of a step, or undo all."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Protocol

from headwater.core.cleanup import on_failure
from headwater.core.interrupts import UninterruptedContext, interruptible
from headwater.core.process_value import ProcessValue


class Participant(Protocol):
    """Interface of an object that a step changes. `end_step` or `abort_step` follows each `begin_step`."""

    def begin_step(self) -> None:
        """Save the state that the object has before the step."""

    def end_step(self) -> None:
        """Keep the changes of the step."""

    def abort_step(self) -> None:
        """Restore the state that `begin_step` has saved."""


class _Transaction:
    """A step that has begun and is not yet committed or aborted.

    Attributes:
        parts: the participants. Closing the stack ends each participant's step, the last to join first. If
            one raises an error, the participants that joined before it are aborted.
        when_committed: actions to call after the commit.
    """

    def __init__(self) -> None:
        self.parts = ExitStack()
        self.when_committed: list[Callable[[], object]] = []

    def join(self, participant: Participant) -> None:
        self.parts.enter_context(_part(participant))


@contextmanager
def _part(participant: Participant) -> Iterator[None]:
    participant.begin_step()
    with on_failure(participant.abort_step):
        yield
    participant.end_step()


@contextmanager
def _finally(action: Callable[[], object]) -> Iterator[None]:
    try:
        yield
    finally:  # an earlier action may have failed
        interruptible(action)  # it may be a closure of the user


_participants: weakref.WeakValueDictionary[int, Participant] = weakref.WeakValueDictionary()  # oldest first
_current = ProcessValue["_Transaction | None"](None)
"""The open step. Shared by the process: models, optimizers and scalers join it without knowing each other."""


def register(participant: Participant, *, undone_last: bool = False) -> None:
    """Add a participant to the open step and to all later steps, for as long as the participant lives.

    Args:
        participant: the participant.
        undone_last: when a step is aborted, abort this participant after those that were registered before.
    """
    if id(participant) in _participants:
        return
    others = list(_participants.items()) if undone_last else []
    for key, _ in others:
        del _participants[key]
    _participants[id(participant)] = participant
    _participants.update(others)
    if _current.value is not None:
        _current.value.join(participant)


def unregister(participant: Participant) -> None:
    """Remove a participant from all steps that begin from now on."""
    _participants.pop(id(participant), None)


def is_open() -> bool:
    """Return true if a step is open."""
    return _current.value is not None


def when_committed(action: Callable[[], object]) -> None:
    """Call `action` after the open step is committed, or now if no step is open.

    If the step is aborted, the action is dropped. An action that raises an error does not undo the step, and
    the other actions are still called.
    """
    if _current.value is None:
        action()
    else:
        _current.value.when_committed.append(action)


def transaction() -> AbstractContextManager[None]:
    """Enter a context whose changes are committed together at its end, or undone if it raises an exception.

    A transaction within another is part of the outer one.
    """
    return UninterruptedContext(_transaction())


@contextmanager
def _transaction() -> Iterator[None]:
    if _current.value is not None:
        yield
        return
    step = _Transaction()
    with _current.replaced(step), step.parts:
        for participant in list(_participants.values()):
            step.join(participant)
        yield
    # Outside of the step: an action that fails must not undo the commit.
    with ExitStack() as stack:
        # Reversed, because a stack calls the last one first.
        for action in reversed(step.when_committed):
            stack.enter_context(_finally(action))
