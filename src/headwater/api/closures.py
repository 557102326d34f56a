"""The queue of closures: run in order and once, when the values they were called with are in host memory."""

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
"""Calls that may wait. A device that is further behind than that is waited for: their values take memory."""


class Event(Protocol):
    """Tells when a copy is complete."""

    def query(self) -> bool:
        """Whether it is."""

    def synchronize(self) -> None:
        """Wait until it is."""


@dataclasses.dataclass(frozen=True)
class Call:
    """A closure with what it is called with.

    Attributes:
        function: the user's.
        args: with every tensor in host memory.
        kwargs: likewise.
        copied: the copies to wait for.
    """

    function: Callable[..., object]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    copied: tuple[Event, ...] = ()

    def is_ready(self) -> bool:
        return all(event.query() for event in self.copied)

    def run(self) -> None:
        """Wait for the values, and call; an exception says which closure it is from."""
        for event in self.copied:
            event.synchronize()
        try:
            with reading_is_free(), alone():
                self.function(*self.args, **self.kwargs)
        except BaseException as error:
            error.add_note(f"in the closure {self.function.__qualname__!r}, called with the values of a step")
            raise


class ClosureQueue:
    """Calls that wait for their values.

    Args:
        longest: calls that may wait at most.
    """

    def __init__(self, longest: int = LONGEST_QUEUE) -> None:
        self._longest = longest
        self._waiting: deque[Call] = deque()
        self._running = False

    @property
    def is_running(self) -> bool:
        """Whether a closure is being run: what is called then is called by it."""
        return self._running

    def add(self, call: Call) -> None:
        """Put it at the end, and run what is ready; raises what a call raises."""
        self._waiting.append(call)
        self.run_ready()

    def run_ready(self) -> None:
        """Run the calls whose values are there, up to the first whose are not.

        Raises:
            BaseException: of the first call that fails; it is done with, and those after it keep waiting.
        """
        if self._running:
            return
        while self._waiting and (len(self._waiting) > self._longest or self._waiting[0].is_ready()):
            self._run_next()

    def run_all(self) -> None:
        """Run every call, waiting for its values, those after one that fails too; then raise."""
        if self._running or not self._waiting:
            return
        try:
            self._run_next()
        finally:
            self.run_all()

    def run_now(self, call: Call) -> None:
        """Run every call that waits, then this one."""
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
    """The call with copies of its tensors, without their graph, in host memory or on their way there.

    The device goes on meanwhile, and nothing that happens to the originals reaches the copies. Of several
    ranks each gives its part, and gets the values of the whole batch.
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
    value = value.clone()  # on the device and in order, for the original may change before the copy begins
    stream.wait_stream(torch.cuda.current_stream(value.device))
    value.record_stream(stream)
    with torch.cuda.stream(stream):
        return torch.empty_like(value, device="cpu", pin_memory=True).copy_(value, non_blocking=True)
