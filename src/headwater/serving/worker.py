"""A thread that generates the tokens of one model for requests of other threads."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import final

from headwater.core.errors import HeadwaterError, RunError
from headwater.generation.batcher import Batcher
from headwater.generation.requests import Generation, GenerationRequest

logger = logging.getLogger(__name__)

Ended = Callable[[Generation, HeadwaterError | None], None]
"""Called on the worker's thread when a generation has ended, with the error if one ended it."""


@final
class Worker:
    """Runs a batcher on a separate thread. Methods may be called by any thread.

    Args:
        batcher: generates. Only the worker uses it from now on, except for its `room`.
        name: name of the thread.
    """

    def __init__(self, batcher: Batcher, name: str) -> None:
        self.batcher = batcher
        self.passes = 0
        self._changed = threading.Condition()
        self._new: list[tuple[Generation, Ended]] = []
        self._cancelled: list[Generation] = []
        self._closing = False
        self._error: HeadwaterError | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Number of requests that wait for memory, or for the next pass."""
        with self._changed:
            return len(self._new) + self.batcher.waiting

    @property
    def max_length(self) -> int:
        """Most tokens whose keys and values one request may need."""
        return self.batcher.room.max_length

    @property
    def active(self) -> int:
        """Number of sequences that are computed."""
        return self.batcher.active

    @property
    def used_cache_tokens(self) -> int:
        """Tokens for which keys and values have memory."""
        return self.batcher.used_cache_tokens

    @property
    def cache_limit_tokens(self) -> int:
        """Most tokens for which keys and values have memory."""
        return self.batcher.limits.cache_tokens

    @property
    def error(self) -> HeadwaterError | None:
        """The error that ended the worker; `None` while it works."""
        return self._error

    def submit(self, request: GenerationRequest, ended: Ended) -> Generation:
        """Put a request into the queue.

        Args:
            request: the request; `receive` is called on the worker's thread.
            ended: see `Ended`; called exactly once.

        Raises:
            DataError: if the request does not fit the model.
            HeadwaterError: if the worker has ended.
        """
        generation = self.batcher.prepared(request)
        with self._changed:
            if self._error is not None:
                raise self._error
            if self._closing:
                raise RunError("the server is stopping", remedy="send the request again later")
            self._new.append((generation, ended))
            self._changed.notify()
        return generation

    def cancel(self, generation: Generation) -> None:
        """End a generation after the pass that is computed now."""
        with self._changed:
            self._cancelled.append(generation)
            self._changed.notify()

    def close(self) -> None:
        """Cancel all generations and end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        open_ones: dict[Generation, Ended] = {}
        try:
            while self._next(open_ones):
                self.batcher.step()
                self.passes += 1
                self._end(open_ones, None)
            error: HeadwaterError = RunError("the server has stopped", remedy="send the request again later")
        except HeadwaterError as found:
            error = found
        except Exception as found:
            logger.exception("generation failed")
            error = RunError(
                f"generation failed: {found!r}", remedy="see the log of the server, and restart it"
            )
        with self._changed:
            self._error = error
            open_ones.update(self._new)
            self._new.clear()
        for generation in open_ones:
            generation.reason = generation.reason or "cancelled"
        self._end(open_ones, error)

    def _next(self, open_ones: dict[Generation, Ended]) -> bool:
        """Block until there is work, and take new requests. Return False if the worker is to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._new or self._cancelled or open_ones)
            new, self._new = self._new, []
            cancelled, self._cancelled = self._cancelled, []
            closing = self._closing
        open_ones.update(new)
        for generation, _ in new:
            self.batcher.enter(generation)
        for generation in cancelled:
            self.batcher.cancel(generation)
        self._end(open_ones, None)
        return not closing

    def _end(self, open_ones: dict[Generation, Ended], error: HeadwaterError | None) -> None:
        """Report the generations that have ended."""
        for generation in [each for each in open_ones if each.reason is not None]:
            open_ones.pop(generation)(generation, generation.error or error)
