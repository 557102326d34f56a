"""Calls the callbacks of a run, and keeps the error of one until the run can stop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import final

from headwater.core.errors import HeadwaterError
from headwater.trainer.callback import Callback, FitStart


@final
class CallbackRunner:
    """The callbacks of a run. Each event is passed to all of them, in their order.

    Attributes:
        callbacks: the callbacks.
        failure: the first error in `tell`; `None` if there was no error. The run writes a checkpoint before
            it raises this error.

    Args:
        callbacks: see above.
    """

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self.callbacks = callbacks
        self.failure: HeadwaterError | None = None
        self._started: list[Callback] = []

    def start(self, event: FitStart) -> None:
        """Call `on_fit_start` of every callback. Raise the first error."""
        for callback in self.callbacks:
            callback.on_fit_start(event)
            # It is noted after its start, because a callback whose start has failed is not ended.
            self._started.append(callback)

    def tell(self, call: Callable[[Callback], None]) -> None:
        """Run `call` for every callback, even if one of them fails. Keep the first error."""
        for callback in self.callbacks:
            try:
                call(callback)
            except HeadwaterError as error:
                self.failure = self.failure or error

    @contextmanager
    def told_of(self, error: BaseException) -> Iterator[None]:
        """Call `on_fit_error` of every started callback after the context, even if one of them fails."""
        with ExitStack() as stack:
            # An exit stack calls the last one first: the first callback is told first.
            for callback in reversed(self._started):
                stack.callback(callback.on_fit_error, error)
            yield

    @contextmanager
    def ended(self) -> Iterator[None]:
        """End every started callback after the context, even if the context or one of them fails."""
        with ExitStack() as stack:
            # As in `told_of`: the first callback ends first.
            for callback in reversed(self._started):
                stack.callback(callback.on_fit_end)
            yield
