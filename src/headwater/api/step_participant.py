"""The steps of a streamed model: each is a transaction, and ranks exchange its results."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, final

from headwater.fabric.membership import require_all_ranks
from headwater.store.store import WeightStore

if TYPE_CHECKING:
    from headwater.api.engine_swap import ReplaceableEngine

logger = logging.getLogger(__name__)


@final
class StreamedSteps:
    """Commits or undoes what a traced step changes in a streamed model.

    Args:
        current_engine: the engine of the model.

    Attributes:
        updates_at_once: true if updates must not wait for the next forward; see `OptimizerRecord`.
    """

    def __init__(self, current_engine: ReplaceableEngine) -> None:
        self._current = current_engine
        self._undo_buffers: Callable[[], None] = _nothing
        self.updates_at_once = False
        # Store -> number of its commits whose scalars all ranks have.
        self._shared: weakref.WeakKeyDictionary[WeightStore, int] = weakref.WeakKeyDictionary()

    def begin_step(self) -> None:
        engine = self._current.engine
        if engine is not None:
            engine.store.begin_transaction()
            self._undo_buffers = engine.buffers.remember()

    def end_step(self) -> None:
        engine = self._current.engine
        if engine is not None:
            engine.store.end_transaction()
            self.apply_updates()
        self._undo_buffers = _nothing

    def abort_step(self) -> None:
        engine = self._current.engine
        if engine is None:
            return
        engine.executor.reset()
        if not engine.store.roll_back():
            logger.warning(
                "the step is not undone completely: it has updated weights and called the model again, so "
                "the updates before that call stay; later updates are undone, and buffers are as before"
            )
        self._undo_buffers()
        self.end_step()

    def apply_updates(self) -> None:
        """Apply all pending updates with several ranks, or if they must not wait. All ranks must call this.

        With several ranks, a rank can then read weights without the others.
        """
        if self._current.fabric.size > 1 or self.updates_at_once:
            self._current.present.store.flush()

    def share_scalars(self) -> None:
        """Exchange the optimizer scalars, so that every rank has those of all parameters.

        All ranks must call this.

        Raises:
            StreamError: if one rank calls this alone and does not have all scalars.
        """
        store = None if self._current.engine is None else self._current.engine.store
        if store is None or self._current.fabric.size == 1:
            return
        if store.ledger.num_commits == self._shared.get(store, 0):
            return
        # Scalars are exchanged only here, because a single rank may read those that it has already.
        require_all_ranks("the state of an optimizer")
        store.scalars.share()
        self._shared[store] = store.ledger.num_commits


def _nothing() -> None:
    pass
