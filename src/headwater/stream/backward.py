"""Detection of the beginning and the end of a backward, even if the user's code started it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from headwater.core.interrupts import uninterrupted
from headwater.core.recorder import COMPUTE, RECORDER, Lane, Work

_NO_TASK = -1
OTHER_COMPUTE: Work = (COMPUTE, "")
"""Computation outside of all stages."""


class BackwardWatch:
    """A detector of backwards: it says whether one runs, and calls a function when it ends.

    The user may call `backward` on any tensor, and autograd does not announce it. So the first hook or fetch
    inside a backward calls `notice`.

    Attributes:
        lane: the recorder's lane of the thread that began the last forward. Autograd may run the backward on
            another thread, which then records its work in this lane.

    Args:
        at_end: called once at the end of each backward that was noticed.
    """

    def __init__(self, at_end: Callable[[], None]) -> None:
        self._at_end = at_end
        self._task = _NO_TASK
        self.lane: Lane = RECORDER.lane()
        self._outer: Work | None = None  # what the thread did before the backward

    @property
    def is_running(self) -> bool:
        """True if the calling thread runs a part of a backward."""
        return torch._C._current_graph_task_id() != _NO_TASK

    def notice(self) -> None:
        """Ask autograd to call back at the end of the backward that runs now, if one does."""
        task = torch._C._current_graph_task_id()
        if task not in (_NO_TASK, self._task):
            self._task = task
            RECORDER.use(self.lane)
            self._outer = self.lane.work
            if self._outer is None:
                self.lane.switch(OTHER_COMPUTE)
            torch.autograd.Variable._execution_engine.queue_callback(self._end)

    @uninterrupted
    def _end(self) -> None:
        self.forget()
        self._at_end()

    def forget(self) -> None:
        """Forget a backward that an error has ended, because autograd does not report its end."""
        if self._task != _NO_TASK:
            self._task = _NO_TASK
            # `None`: the error has ended the whole training step, so no earlier work continues.
            if self.lane.work is not None:
                self.lane.switch(self._outer)
