"""Traces of a program that is run several times, so that a later run makes no dry runs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from headwater.plan.step_trace import Trace

_IN_USE: ContextVar[KnownTraces | None] = ContextVar("known_traces", default=None)


class KnownTraces:
    """The traces of one program, in the order of its dry runs.

    A trace does not depend on the plan. A program that computes the same in each run makes the same dry runs
    under each plan.
    """

    def __init__(self) -> None:
        self._traces: dict[tuple[int, Hashable], Trace] = {}
        self._made = 0

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Enter a context for one run of the program, whose dry runs use these traces."""
        # Each run of the program makes the same dry runs in the same order, so start at the first one.
        self._made = 0
        token = _IN_USE.set(self)
        try:
            yield
        finally:
            _IN_USE.reset(token)

    def get(self, conditions: Hashable, make: Callable[[], Trace]) -> Trace:
        """Return the trace of the next dry run. Make it if no trace is known for these conditions."""
        key = (self._made, conditions)
        self._made += 1
        if key not in self._traces:
            self._traces[key] = make()
        return self._traces[key]


def known_or_made(conditions: Hashable, make: Callable[[], Trace]) -> Trace:
    """Return the trace of the next dry run: from the `KnownTraces` in use, or else made by `make`."""
    known = _IN_USE.get()
    return make() if known is None else known.get(conditions, make)
