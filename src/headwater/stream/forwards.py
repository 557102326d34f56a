"""Tracks which forwards run now, of the model or of a module that the user calls, and binds their stages."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from headwater.core.errors import StreamError
from headwater.core.recorder import COMPUTE, RECORDER, Work
from headwater.stream.backward import OTHER_COMPUTE, BackwardWatch
from headwater.stream.packing import Packing
from headwater.stream.saved_tensors import own_checkpoints

if TYPE_CHECKING:
    from headwater.stream.binding import Binder


class Forwards:
    """Binds the stages of a module while its forward runs.

    The outermost call begins a forward and ends it. A call inside a backward belongs to that backward, where
    a checkpoint runs a module again.

    Attributes:
        are_followed: false while calls of the model are ignored.

    Args:
        binder: binds and unbinds parameters.
        require: returns the image of a stage, up to date.
        packing: replaces the tensors that autograd saves; `None` if it may save all of them.
        backward: the backward that runs now, if one does.
        opened: called when a forward begins outside of a backward.
        closed: called when it has ended.
        names: name of each stage.
    """

    def __init__(
        self,
        binder: Binder,
        require: Callable[[int], torch.Tensor],
        packing: Packing | None,
        backward: BackwardWatch,
        opened: Callable[[], None],
        closed: Callable[[], None],
        names: Sequence[str],
    ) -> None:
        self._binder = binder
        self._require = require
        self._packing = packing
        self._backward = backward
        self._opened = opened
        self._closed = closed
        self._nesting = 0  # calls of modules that run
        self._thread = 0  # runs the outermost of these calls
        self._entering = threading.RLock()
        self._work: list[Work] = [(COMPUTE, name) for name in names]
        self._outer: list[Work | None] = []  # what the thread did before each of these calls
        self._depth: Counter[int] = Counter()  # by stage, how many of these calls use it
        self.are_followed = True

    @property
    def are_running(self) -> bool:
        """True inside a forward."""
        return self._nesting > 0

    def enter(self, stages: Sequence[int]) -> None:
        """Bind the stages of a module whose forward begins. After an error the forward has ended.

        Raises:
            StreamError: if a forward of another thread runs.
        """
        if not self.are_followed:
            return
        with self._entering:
            if not self._nesting:
                self._begin()
                self._thread = threading.get_ident()
            elif self._thread != threading.get_ident():
                raise StreamError(
                    "two threads call the model, or parts of it, at the same time",
                    remedy="call it from one thread at a time: hold a lock from the forward to the end of "
                    "its backward",
                )
            self._nesting += 1
        lane = RECORDER.lane()
        self._outer.append(lane.work)
        if stages:
            lane.switch(self._work[stages[-1]])
        elif lane.work is None:
            lane.switch(OTHER_COMPUTE)
        if self._packing is not None:
            try:
                self._packing.begin_module(stages)
            except BaseException:  # the user has disabled saved-tensor hooks, or Ctrl-C: no `leave` follows
                self._end_module()
                raise
        for count, stage in enumerate(stages, start=1):
            self._depth[stage] += 1
            # Several nested modules may use a stage; the outermost binds it.
            if self._depth[stage] == 1:
                try:
                    self._binder.bind(stage, self._require)
                except BaseException:  # an interrupt too: the module does not run, so no `leave` follows
                    self.leave(stages[:count])
                    raise

    def _begin(self) -> None:
        if self._backward.is_running:  # the previous recomputed stage is finished
            self._backward.notice()
            self._binder.unbind_all()
        else:
            self._opened()

    def bind_early(self, stages: Sequence[int]) -> None:
        """Bind stages whose modules will be called next. `leave` of those modules unbinds them."""
        if self.are_followed:
            for stage in stages:
                self._binder.bind(stage, self._require)

    def leave(self, stages: Sequence[int]) -> None:
        """Unbind the stages of a module whose forward has ended, or failed."""
        if not self.are_followed:
            return
        try:
            for stage in stages:
                self._depth[stage] -= 1
                # `reset` may have cleared the count.
                if self._depth[stage] <= 0:
                    self._unbind(stage)
        finally:
            # This is in `finally`: a stage that refuses a changed weight must not leave the forward open.
            if self._packing is not None:
                self._packing.end_module()
            self._end_module()

    def _end_module(self) -> None:
        self._nesting -= 1
        self._resume()
        # A recomputed forward ends inside a backward, which still needs the bound weights.
        if not self._nesting and not self._backward.is_running:
            self._closed()

    def _resume(self) -> None:
        """Record that the work from before the call continues."""
        if self._outer:
            outer = self._outer.pop()
            # After a recomputed forward, the backward of the same stage follows.
            if self._outer or not self._backward.is_running:
                RECORDER.lane().switch(outer)

    def _unbind(self, stage: int) -> None:
        if self._backward.is_running and own_checkpoints.are_innermost():
            # Not unbound from their slab: a recomputed forward saves the objects of frozen parameters.
            self._binder.stages[stage].put_at_rest()
        else:
            self._binder.stages[stage].unbind()

    def reset(self) -> None:
        """Forget the forwards that an error has ended."""
        self._depth.clear()
        if self._outer:
            # The error may have ended a whole training step: then nothing continues.
            if RECORDER.lane().work is not None:
                RECORDER.lane().switch(self._outer[0])
            self._outer.clear()
        self._nesting = 0
        if self._packing is not None:
            self._packing.reset()
