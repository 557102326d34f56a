"""The recorder of a process: records which work ran when, on which thread, for which stage.

[Note: one state for each thread]
A thread does one kind of work at a time. So the events of a thread never overlap: work that begins inside
other work interrupts it. The sum of the events of a thread is the time in which it had work.
"""

from __future__ import annotations

import threading
from collections import deque
from itertools import islice
from time import perf_counter_ns
from typing import Final, Literal, NamedTuple, final

Kind = Literal[
    "input",
    "compute",
    "wait",
    "fetch",
    "update",
    "gradient",
    "disk read",
    "disk write",
    "collective",
]
"""A kind of work.

- input: wait for the next batch of data
- compute: forward and backward
- wait: wait for weights, or for the disk
- fetch: copy of weights to a slab
- update: the optimizer's work
- gradient: sums and norms of gradients
- disk read, disk write: transfers of the disk tier
- collective: waits and transfers between ranks
"""

INPUT: Final = "input"
COMPUTE: Final = "compute"
WAIT: Final = "wait"
FETCH: Final = "fetch"
UPDATE: Final = "update"
GRADIENT: Final = "gradient"
DISK_READ: Final = "disk read"
DISK_WRITE: Final = "disk write"
COLLECTIVE: Final = "collective"

KINDS: Final[tuple[Kind, ...]] = (
    INPUT, COMPUTE, WAIT, FETCH, UPDATE, GRADIENT, DISK_READ, DISK_WRITE, COLLECTIVE
)  # fmt: skip

Work = tuple[Kind, str]
"""A kind of work and the name of its stage; the name is empty if the stage is unknown."""

CAPACITY: Final = 1 << 15
"""Number of events that the recorder keeps: about 6 MB, and some hundred steps of a GPT with 12 blocks."""

_FIRST_LOOK = 512
_LATE_NS = 50_000_000  # an event is appended at most this long after its end, unless its thread is starved


class Event(NamedTuple):
    """A piece of recorded work: its kind, stage, thread, begin, end and bytes.

    Attributes:
        kind: kind of work.
        stage: name of the stage; empty if it is unknown.
        thread: name of the thread.
        begin: clock of `time.perf_counter_ns`.
        end: the same clock.
        num_bytes: bytes that were moved. If other work interrupted this work, only its last piece has them.
    """

    kind: Kind
    stage: str
    thread: str
    begin: int
    end: int
    num_bytes: int


@final
class Lane:
    """Records the work of one thread, and holds what the thread does now. Only that thread uses the lane.

    Attributes:
        thread: name of the thread.
        work: what it does now; `None` if it does nothing that is recorded.
    """

    __slots__ = ("_begin", "_recorder", "thread", "work")

    def __init__(self, recorder: Recorder, thread: str) -> None:
        self._recorder = recorder
        self.thread = thread
        self.work: Work | None = None
        self._begin = 0

    def switch(self, work: Work | None, num_bytes: int = 0) -> Work | None:
        """Record the end of this thread's current work, and begin `work`.

        Args:
            work: the next work; `None` for nothing.
            num_bytes: bytes that the work which ends now has moved.

        Returns:
            The work that ends now.
        """
        recorder, before = self._recorder, self.work
        if work is before or not recorder.is_on:
            return before
        now = perf_counter_ns()
        if before is not None:
            # A plain tuple: an `Event` costs more to make than all the rest.
            recorder.append((*before, self.thread, self._begin, now, num_bytes))
        self.work, self._begin = work, now
        return before


@final
class Span:
    """A context manager that records what the calling thread does inside as one piece of work.

    Attributes:
        num_bytes: bytes that the work moves; may be set inside the context.
    """

    __slots__ = ("_lane", "_local", "_outer", "_work", "num_bytes")

    def __init__(self, local: _Local, work: Work, num_bytes: int) -> None:
        self._local = local
        self._work = work
        self.num_bytes = num_bytes

    def __enter__(self) -> Span:
        self._lane = lane = self._local.lane
        self._outer = lane.switch(self._work)
        return self

    def __exit__(self, *exception: object) -> None:
        self._lane.switch(self._outer, self.num_bytes)


class _Local(threading.local):
    """The lane of each thread."""

    def __init__(self, recorder: Recorder) -> None:
        self.lane = Lane(recorder, threading.current_thread().name)


@final
class Recorder:
    """Keeps the most recent events of all threads. It is on by default; a span costs about a microsecond.

    Attributes:
        is_on: false to record nothing, for measurements of the cost.
        append: adds an event to the ring. Any thread may call it.

    Args:
        capacity: number of events that are kept.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.is_on = True
        # `append` of a deque is atomic, so that no thread needs a lock.
        self._events: deque[tuple[Kind, str, str, int, int, int]] = deque(maxlen=capacity)
        self.append = self._events.append
        self._local = _Local(self)

    def span(self, kind: Kind, stage: str = "", num_bytes: int = 0) -> Span:
        """Return a context. What the calling thread does inside is recorded as work of this kind.

        Args:
            kind: kind of work.
            stage: name of the stage.
            num_bytes: bytes that are moved.
        """
        return Span(self._local, (kind, stage), num_bytes)

    def lane(self) -> Lane:
        """Return the lane of the calling thread."""
        return self._local.lane

    def use(self, lane: Lane) -> None:
        """Make the calling thread continue the lane of another thread, which blocks meanwhile.

        Autograd runs the backward of a GPU on another thread.
        """
        self._local.lane = lane

    def events(self, begin: int, end: int) -> list[Event]:
        """Return the events that overlap with a range of time, in the order of their ends.

        Args:
            begin: clock of `time.perf_counter_ns`.
            end: the same clock.

        Returns:
            Complete events. Work that has not ended yet is missing.
        """
        found = [event for event in self._since(begin) if event[4] > begin and event[3] < end]
        return [Event(*event) for event in reversed(found)]

    def _since(self, begin: int) -> list[tuple[Kind, str, str, int, int, int]]:
        """Return all events that ended after `begin`, the latest first; some earlier ones may follow."""
        count = _FIRST_LOOK
        while True:
            try:
                last = list(islice(reversed(self._events), count))
            except RuntimeError:  # another thread has added an event meanwhile
                continue
            if len(last) < count or last[-1][4] < begin - _LATE_NS:
                return last
            count *= 4


RECORDER: Final = Recorder()
"""The recorder of this process."""
