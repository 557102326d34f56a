"""Locks of stages, and which stages are torn: a change of a torn stage has begun and has not ended."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import final

from headwater.core.errors import DeviceFullError, HeadwaterError, StoreError

RESUME = "resume from the last checkpoint"
"""The remedy if the values of some stages are lost."""


@final
class StageLocks:
    """One lock per stage. A thread that holds a lock may take it again.

    Args:
        names: the names of the stages, for errors.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        # Reentrant: a snapshot reads a stage that the updating thread holds already.
        self._locks = [threading.RLock() for _ in names]
        self._torn: dict[int, str] = {}  # torn stages, and why
        # Stages that may have values of a step that has failed, and which step.
        self._lost: dict[int, str] = {}

    @contextmanager
    def exclusive(self, stage: int) -> Iterator[None]:
        """Hold the lock of a stage in the context, even if the stage is torn."""
        with self._locks[stage]:
            yield

    @contextmanager
    def whole(self, stage: int, *, before_step: bool = False) -> Iterator[None]:
        """Hold the lock of a stage in the context. Raise if the stage is torn, or if a step is lost.

        Args:
            stage: the stage.
            before_step: true if the caller knows that the stage has its values from before the lost step.

        Raises:
            StoreError: if the stage is torn: a part of an update is applied, and a part is lost. Or if a step
                has failed whose updates were applied to some stages.
        """
        with self._locks[stage]:
            # These checks are inside the lock, because another thread may just be changing the stage.
            if stage in self._lost and not before_step:
                raise _lost_error(self._lost[stage])
            if stage in self._torn:
                raise StoreError(
                    f"an update of stage {self._names[stage]!r} failed halfway: {self._torn[stage]}",
                    remedy=RESUME,
                )
            yield

    @contextmanager
    def changing(self, stage: int) -> Iterator[None]:
        """Mark a stage as torn during the context. If the context raises, the stage stays torn.

        After a `DeviceFullError` the stage is not torn, because its update continues at its next use. The
        caller holds the lock.
        """
        self._torn[stage] = "it was interrupted"  # before the change, in case a signal ends the thread
        try:
            yield
        except DeviceFullError:
            self._torn.pop(stage, None)
            raise
        except Exception as error:
            self._torn[stage] = error.what if isinstance(error, HeadwaterError) else repr(error)
            raise
        self._torn.pop(stage, None)

    def is_changing(self, stage: int) -> bool:
        """True if a thread is changing a stage, or if a change has failed."""
        return stage in self._torn

    def lose(self, step: str) -> None:
        """Make every later use of any stage raise, because a step has failed that some stages have applied.

        Args:
            step: which step, and why it has failed; a sentence.
        """
        self._lost = dict.fromkeys(range(len(self._names)), step)

    @property
    def has_lost_step(self) -> bool:
        """True if a step has failed that some stages have applied."""
        return bool(self._lost)

    def require_no_lost_step(self) -> None:
        """Raise `StoreError` if a step has failed that some stages have applied."""
        for step in self._lost.values():
            raise _lost_error(step)

    def mend(self, stage: int) -> None:
        """Mark a stage as whole, because all its values are replaced. The caller holds the lock."""
        self._torn.pop(stage, None)
        self._lost.pop(stage, None)


def _lost_error(step: str) -> StoreError:
    return StoreError(step, remedy=RESUME)
