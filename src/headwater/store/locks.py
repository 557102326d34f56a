"""Locks of stages, and which stages are torn: a change of a torn stage has begun and has not ended."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import final

from headwater.core.errors import DeviceFullError, HeadwaterError, StoreError


@final
class StageLocks:
    """One lock per stage. A thread that holds a lock may take it again.

    Args:
        names: of the stages, for errors.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        # Reentrant: a snapshot reads a stage that the updating thread holds already.
        self._locks = [threading.RLock() for _ in names]
        self._torn: dict[int, str] = {}  # torn stages, and why

    @contextmanager
    def exclusive(self, stage: int) -> Iterator[None]:
        """Hold the lock of a stage in the context, even if the stage is torn."""
        with self._locks[stage]:
            yield

    @contextmanager
    def whole(self, stage: int) -> Iterator[None]:
        """Hold the lock of a stage in the context. Raise if the stage is torn.

        Raises:
            StoreError: if the stage is torn: a part of an update is applied, and a part is lost.
        """
        with self._locks[stage]:
            # Inside the lock: another thread may just be changing the stage.
            if stage in self._torn:
                raise StoreError(
                    f"an update of stage {self._names[stage]!r} failed halfway: {self._torn[stage]}",
                    remedy="resume from the last checkpoint",
                )
            yield

    @contextmanager
    def changing(self, stage: int) -> Iterator[None]:
        """Mark a stage as torn during the context. If the context raises, the stage stays torn.

        After a `DeviceFullError` the stage is not torn, because its update continues at its next use. The
        caller holds the lock.
        """
        self._torn[stage] = "it was interrupted"  # before the change, in case that a signal ends the thread
        try:
            yield
        except DeviceFullError:
            self._torn.pop(stage, None)
            raise
        except HeadwaterError as error:
            self._torn[stage] = error.what
            raise
        self._torn.pop(stage, None)

    def mend(self, stage: int) -> None:
        """Mark a stage as not torn, because all its values are replaced. The caller holds the lock."""
        self._torn.pop(stage, None)
