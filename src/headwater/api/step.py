"""The parts of a user's training loop: the traced step, and the closures that read its results."""

from __future__ import annotations

import atexit
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, Protocol, TypeVar

from headwater.api.closures import ClosureQueue, host_call
from headwater.api.registry import streamed_models
from headwater.api.transaction import is_open, transaction, when_committed
from headwater.api.values import traced
from headwater.core.errors import StreamError
from headwater.core.interrupts import interruptible, uninterrupted
from headwater.core.trees import map_tensors
from headwater.fabric.membership import current

P = ParamSpec("P")
R = TypeVar("R")


class Loop(Protocol):
    """A loop that drives the steps and decides at which of them closures run."""

    @property
    def at_activation_step(self) -> bool:
        """True if step closures run now."""

    @property
    def at_checkpoint_step(self) -> bool:
        """True if checkpoint closures run now."""


_closures = ClosureQueue()
_loops: list[Loop] = []
atexit.register(_closures.run_all)


@contextmanager
def driven_by(loop: Loop) -> Iterator[None]:
    """Enter a context in which `loop` decides which closures run. At its end, run all waiting closures."""
    _loops.append(loop)
    try:
        yield
    finally:
        _loops.remove(loop)
        _closures.run_all()


def trace(step: Callable[P, R]) -> Callable[P, R]:
    """Decorate a training or evaluation step.

    The step is a transaction: an error in it undoes all changes to streamed models and their optimizers,
    except that updates stay if the step has called the model again after them. A warning says so.
    Tensors in its result, in any nesting, are detached from their graph. Closures read their values. Code
    outside of closures can read a value too; this waits for the device and warns once per process.

    Args:
        step: any function. A traced function that is called within another is part of the outer step.

    Returns:
        A function called like `step`.
    """

    @uninterrupted  # including the end of the transaction: Ctrl-C must not skip it
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with transaction():
            result: R = map_tensors(traced, interruptible(step, *args, **kwargs))
        return result

    @functools.wraps(step)
    def traced_step(*args: P.args, **kwargs: P.kwargs) -> R:
        if is_open():
            return step(*args, **kwargs)
        _closures.run_ready()
        return run(*args, **kwargs)

    return traced_step


compile_step = trace
"""The older name of `trace`."""


def step_closure(function: Callable[P, object]) -> Callable[P, None]:
    """Decorate a function that reads the results of a step, for example to print or log them.

    Each call runs once and in order, with copies of the tensors in host memory. The device does not wait for
    it. On a CPU the call runs at once; values from a GPU arrive some steps later, and the call runs then. All
    waiting calls run when the executor's loop ends, before a checkpoint closure runs, and when the program
    ends. A call from within a traced step runs after the step is committed, and is dropped if the step fails.
    With several ranks, the calls run on rank 0, with the values of the whole batch (see
    `headwater.distributed.whole`).

    Args:
        function: the function; its return value is dropped. An exception in it is raised at the call or at a
            later step, with a note that names the function. The loop may catch it and continue.

    Returns:
        A function with the parameters of `function`; it takes results of a step and any other values.
    """

    @functools.wraps(function)
    def closure(*args: P.args, **kwargs: P.kwargs) -> None:
        if _closures.is_running:
            function(*args, **kwargs)
        elif not _loops or _loops[-1].at_activation_step:
            # Every rank makes this call, because the copies are values of the whole batch.
            call = host_call(function, args, kwargs)
            if current().rank == 0:
                when_committed(lambda: _closures.add(call))

    return closure


def checkpoint_closure(function: Callable[P, object]) -> Callable[P, None]:
    """Decorate a function that saves a checkpoint. Call it after every step.

    Within the loop of a `DataExecutor` a call runs only at a checkpoint step and at the last step. Elsewhere
    every call runs. Step closures that were called earlier run first.

    Args:
        function: the function; its return value is dropped. It gets tensors as a step closure does.

    Returns:
        A function with the parameters of `function`. It raises `StreamError` if it is called from within a
        closure, because closures may run some steps late.
    """

    @functools.wraps(function)
    def closure(*args: P.args, **kwargs: P.kwargs) -> None:
        if _closures.is_running:
            raise StreamError(
                "a checkpoint_closure was called inside another closure",
                where=function.__qualname__,
                remedy="call it in the loop, after the step",
            )
        if not _loops or _loops[-1].at_checkpoint_step:
            call = host_call(function, args, kwargs)
            # All ranks exchange scalars: the closure runs on rank 0 only and may read optimizer state.
            for model in streamed_models():
                model.steps.share_scalars()
            if current().rank == 0:
                when_committed(lambda: _closures.run_now(call))

    return closure
