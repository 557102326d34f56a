"""The queue of calls of step closures. They run in order, each once its tensors are in host memory."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol

import torch

from headwater.api.ranks import whole
from headwater.api.values import reading_is_free, untraced
from headwater.core.trees import map_tensors
from headwater.fabric.membership import alone

LONGEST_QUEUE = 16
"""Number of calls that may wait. The values of waiting calls take memory, so further calls block."""


class Event(Protocol):
    """Interface: tells whether a copy from the device is complete."""

    def query(self) -> bool:
        """Return true if the copy is complete."""

    def synchronize(self) -> None:
        """Block until the copy is complete."""


@dataclasses.dataclass(frozen=True)
class Call:
    """A closure with the arguments of one call.

    Attributes:
        function: the user's function.
        args: positional arguments, with every tensor in host memory.
        kwargs: keyword arguments, with every tensor in host memory.
        copied: events of the copies that must be complete before the call.
    """

    function: Callable[..., object]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    copied: tuple[Event, ...] = ()

    def is_ready(self) -> bool:
        return all(event.query() for event in self.copied)

    def run(self) -> None:
        """Block until the values are in host memory, then call the function.

        An exception of the function gets a note with the closure's name.
        """
        for event in self.copied:
            event.synchronize()
        try:
            # Only rank 0 runs closures, so nothing in one may wait for the other ranks.
            with reading_is_free(), alone("step closure"):
                self.function(*self.args, **self.kwargs)
        except BaseException as error:
            error.add_note(f"in the closure {self.function.__qualname__!r}, called with the values of a step")
            raise


class ClosureQueue:
    """A queue of calls that wait for their values.

    Args:
        longest: maximum number of waiting calls.
    """

    def __init__(self, longest: int = LONGEST_QUEUE) -> None:
        self._longest = longest
        self._waiting: deque[Call] = deque()
        self._running = False

    @property
    def is_running(self) -> bool:
        """True while a closure runs. Then a new call comes from inside that closure."""
        return self._running

    def add(self, call: Call) -> None:
        """Append a call and run the calls that are ready. Exceptions of these calls are raised here."""
        self._waiting.append(call)
        self.run_ready()

    def run_ready(self) -> None:
        """Run the first calls in the queue, up to one whose values are not in host memory yet.

        If the queue is longer than its maximum, wait for the values of the first calls.

        Raises:
            BaseException: the exception of the first call that fails. That call leaves the queue, and the
                calls after it stay in the queue.
        """
        # A closure that calls another one must end before the calls behind it begin.
        if self._running:
            return
        while self._waiting and (len(self._waiting) > self._longest or self._waiting[0].is_ready()):
            self._run_next()

    def run_all(self) -> None:
        """Run every queued call, even if an earlier one fails. Then raise the last exception."""
        if self._running or not self._waiting:
            return
        # This is a recursion, so that Python chains each later exception to the one before it.
        try:
            self._run_next()
        finally:
            self.run_all()

    def run_now(self, call: Call) -> None:
        """Run every waiting call, then `call`."""
        self._waiting.append(call)
        self.run_all()

    def _run_next(self) -> None:
        with self._marked_running():
            self._waiting.popleft().run()

    @contextmanager
    def _marked_running(self) -> Iterator[None]:
        self._running = True
        try:
            yield
        finally:
            self._running = False


def host_call(function: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """Start to copy a call's tensors to host memory. Return a `Call` that waits for the copies.

    The device does not wait for the copies, and later changes of the originals do not reach the copies.
    With several ranks, the values are those of the whole batch: all ranks must call this.

    Args:
        function: the closure.
        args: positional arguments of the call; tensors in any nesting.
        kwargs: keyword arguments of the call.
    """
    streams: dict[torch.device, torch.cuda.Stream] = {}

    def copy(value: torch.Tensor) -> torch.Tensor:
        value = whole(untraced(value).detach())
        if value.device.type != "cuda":
            return value.to("cpu", copy=True)
        stream = streams[value.device] = _side_stream(value.device)
        return _begin_copy(value, stream)

    args, kwargs = map_tensors(copy, (args, kwargs))
    return Call(function, args, kwargs, tuple(stream.record_event() for stream in streams.values()))


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _begin_copy(value: torch.Tensor, stream: torch.cuda.Stream) -> torch.Tensor:
    value = value.clone()  # on the compute stream: the original may change before the copy begins
    stream.wait_stream(torch.cuda.current_stream(value.device))
    # Otherwise torch could reuse the memory of the clone before the side stream has read it.
    value.record_stream(stream)
    with torch.cuda.stream(stream):
        return torch.empty_like(value, device="cpu", pin_memory=True).copy_(value, non_blocking=True)
