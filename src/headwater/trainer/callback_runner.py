"""Calls the callbacks of a run. An error of a callback is kept until the run can stop."""

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
        failure: the first error in `call_each`; `None` if there was no error. The run writes a checkpoint
            before it raises this error.

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
            # After the call: a callback whose `on_fit_start` has failed must not be ended.
            self._started.append(callback)

    def call_each(self, call: Callable[[Callback], None]) -> None:
        """Run `call` for every callback, even if one of them fails. Keep the first error."""
        for callback in self.callbacks:
            try:
                call(callback)
            except HeadwaterError as error:
                self.failure = self.failure or error

    @contextmanager
    def reporting(self, error: BaseException) -> Iterator[None]:
        """At the end of the context, call `on_fit_error` of every started callback, even if one fails."""
        with ExitStack() as stack:
            # Reversed, because an exit stack calls the last one first.
            for callback in reversed(self._started):
                stack.callback(callback.on_fit_error, error)
            yield

    @contextmanager
    def ending(self) -> Iterator[None]:
        """At the end of the context, call `on_fit_end` of every started callback, also after an error."""
        with ExitStack() as stack:
            # Reversed, as in `reporting`.
            for callback in reversed(self._started):
                stack.callback(callback.on_fit_end)
            yield
