"""The operators inside modules, recorded by `torch.profiler`."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from time import perf_counter_ns
from typing import Any, final

import torch

from headwater.core.errors import RunError

_MARK = "headwater: begin of the profile"
_NUM_MARKS = 5
_MOST_OPERATORS, _MOST_MODULES = 8, 20


@final
class OperatorWatch:
    """Records all operators from now until `stop`.

    Raises:
        RunError: if `torch.profiler` runs already in this process.
    """

    def __init__(self) -> None:
        # If two profilers of torch run at once, one gets no events, without an error.
        if torch._C._autograd._profiler_enabled():
            raise RunError(
                "expected that torch.profiler does not run, but this process runs it already",
                where="operators of a profile",
                remedy="end the other profiler first, or profile without operators",
            )
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        # Without `acc_events`, torch 2.11 warns at the first start that each start clears the events of those
        # before it.
        self._profiler = torch.profiler.profile(activities=activities, acc_events=True)
        self._profiler.start()
        self._running = True
        # The profiler has another clock. Each mark is a moment that is known on both. The first one takes
        # milliseconds, and this thread may be interrupted during any of them, so the shortest one counts.
        self._marks_ns = [_mark() for _ in range(_NUM_MARKS)]

    def stop(self) -> None:
        """End the recording."""
        if self._running:
            self._running = False
            self._profiler.stop()

    def table(self, stamps: Sequence[tuple[int, int]], names: Mapping[int, str]) -> str:
        """Return a table of the operators of each module, and torch's table of all operators.

        Args:
            stamps: (clock, row) whenever another row begins.
            names: name of each row.
        """
        events: list[Any] = list(self._profiler.events())
        marks = sorted(
            (event.time_range.start, event.time_range.end) for event in events if event.name == _MARK
        )
        (before, after), (start, end) = min(
            zip(self._marks_ns, marks, strict=True), key=lambda mark: mark[0][1] - mark[0][0]
        )
        offset_ns = (before + after) / 2 - 1e3 * (start + end) / 2
        begins = [begin for begin, _ in stamps]
        sums: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(lambda: [0.0, 0]))
        for event in events:
            if event.name == _MARK or not event.self_cpu_time_total:
                continue
            place = bisect.bisect_right(begins, offset_ns + 1e3 * event.time_range.start)
            total = sums[stamps[place - 1][1] if place else -1][event.name]
            total[0] += event.self_cpu_time_total
            total[1] += 1
        order = sorted(sums, key=lambda row: -sum(time for time, _ in sums[row].values()))
        lines = []
        for row in order[:_MOST_MODULES]:
            operators = sorted(sums[row].items(), key=lambda item: -item[1][0])[:_MOST_OPERATORS]
            lines.append(names[row])
            lines += [
                f"  {name:<48} {1e-3 * time:>12.3f} ms {count:>8.0f} calls"
                for name, (time, count) in operators
            ]
        averages = self._profiler.key_averages()
        return "\n".join([*lines, "", averages.table(sort_by="self_cpu_time_total", row_limit=40)])


def _mark() -> tuple[int, int]:
    """Record a mark; return the clock before and after it."""
    before = perf_counter_ns()
    with torch.profiler.record_function(_MARK):
        pass
    return before, perf_counter_ns()
