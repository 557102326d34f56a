"""The parts of a user's training loop: the traced step, and the closures that read what it returned."""

from __future__ import annotations

import atexit
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, Protocol, TypeVar

from headwater.api.closures import ClosureQueue, host_call
from headwater.api.streamed import owners
from headwater.api.transaction import is_open, transaction, when_committed
from headwater.api.values import traced
from headwater.core.errors import StreamError
from headwater.core.trees import map_tensors
from headwater.fabric.membership import current

P = ParamSpec("P")
R = TypeVar("R")


class Loop(Protocol):
    """What drives the steps, and knows which of them closures are for."""

    @property
    def at_activation_step(self) -> bool:
        """Whether step closures run now."""

    @property
    def at_checkpoint_step(self) -> bool:
        """Whether checkpoint closures run now."""


_closures = ClosureQueue()
_loops: list[Loop] = []
atexit.register(_closures.run_all)


@contextmanager
def driven_by(loop: Loop) -> Iterator[None]:
    """Within it `loop` says which closures run; at its end all that were called have run."""
    _loops.append(loop)
    try:
        yield
    finally:
        _loops.remove(loop)
        _closures.run_all()


def trace(step: Callable[P, R]) -> Callable[P, R]:
    """Decorates a training or evaluation step.

    The step is a transaction: an exception in it leaves no trace in streamed models and their optimizers.
    The tensors that it returns, nested in any way, come back without their graph; their values are for
    closures to read. Reading one elsewhere works, waits for the device, and warns once per process.

    Args:
        step: any function; a traced function called within another is part of its step.

    Returns:
        A function called like `step`.
    """

    @functools.wraps(step)
    def traced_step(*args: P.args, **kwargs: P.kwargs) -> R:
        if is_open():
            return step(*args, **kwargs)
        _closures.run_ready()
        with transaction():
            result: R = map_tensors(traced, step(*args, **kwargs))
        return result

    return traced_step


compile_step = trace
"""The older name of `trace`."""


def step_closure(function: Callable[P, object]) -> Callable[P, None]:
    """Decorates a function that reads what a step returned: prints it, logs it, gathers it.

    Its calls run in order and once, with copies of the tensors in host memory, without the device waiting: at
    once on a CPU, some steps later where the values come from a GPU. All have run when the executor's loop
    ends, before a checkpoint closure runs, and when the program ends. A call from within a traced step runs
    after that step is committed, and never if it fails. Of several ranks the first runs them, with the values
    of the whole batch (see `headwater.distributed.whole`).

    Args:
        function: what it returns is dropped. An exception in it is raised at the call or at a later step,
            with a note that names the function; the loop may go on.

    Returns:
        A function called like `function`, with values of a step or anything else.
    """

    @functools.wraps(function)
    def closure(*args: P.args, **kwargs: P.kwargs) -> None:
        if _closures.is_running:
            function(*args, **kwargs)
        elif not _loops or _loops[-1].at_activation_step:
            call = host_call(function, args, kwargs)
            if current().rank == 0:
                when_committed(lambda: _closures.add(call))

    return closure


def checkpoint_closure(function: Callable[P, object]) -> Callable[P, None]:
    """Decorates a function that saves a checkpoint. Call it after every step.

    Within the loop of a `DataExecutor` only the calls at its checkpoint steps and at its last step truly run;
    elsewhere every call does. The step closures that were called before it have run then.

    Args:
        function: what it returns is dropped; it gets tensors as a step closure does.

    Returns:
        A function called like `function`.

    Raises:
        StreamError: when it is called from within a closure, which may run some steps late.
    """

    @functools.wraps(function)
    def closure(*args: P.args, **kwargs: P.kwargs) -> None:
        if _closures.is_running:
            raise StreamError(
                f"the checkpoint closure {function.__qualname__!r} is called from within a closure",
                remedy="call it in the loop, after the step",
            )
        if not _loops or _loops[-1].at_checkpoint_step:
            call = host_call(function, args, kwargs)
            for model in list(owners.values()):
                model.share_scalars()
            if current().rank == 0:
                when_committed(lambda: _closures.run_now(call))

    return closure
