"""Pools of threads that read, write, update and send beside the computation."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from headwater.core.errors import StreamError
from headwater.core.threads import leave_cores, use_one_core

P = ParamSpec("P")
R = TypeVar("R")


class WorkerPool(ThreadPoolExecutor):
    """A pool of threads that raises an error in a fork of the process.

    A fork has the object but not its threads, so work that it submits would never be done.

    Args:
        num_threads: number of threads.
        name: the beginning of their names.
        initializer: called by each thread when it begins.
    """

    def __init__(self, num_threads: int, name: str, initializer: Callable[[], None] | None = None) -> None:
        super().__init__(num_threads, thread_name_prefix=name, initializer=initializer)
        self._process = os.getpid()

    def submit(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Return the future of `function`, which a thread will call. Raise as `check_process` does."""
        self.check_process()
        return super().submit(function, *args, **kwargs)

    def check_process(self) -> None:
        """Raise an error if the caller cannot wait for the threads.

        Raises:
            StreamError: in a fork of the process that made the pool.
        """
        if os.getpid() != self._process:
            raise StreamError(
                "expected a call or a read in the process that streams the model, got one in a fork of the "
                "process, which lacks the threads that move weights",
                remedy="make a plain copy before the fork: copy.deepcopy(model) or weight.detach().clone()",
            )


def single_core_pool(num_threads: int, name: str) -> WorkerPool:
    """Return a pool of threads whose torch operators use one core each.

    Operators that divide their work among cores meet at a barrier. If other work uses the same cores, most of
    the time is spent at that barrier. Without a known OpenMP library operators still divide their work.
    """
    return WorkerPool(num_threads, name, use_one_core)


def update_pool(name: str, *, on_cpu: bool) -> WorkerPool:
    """Return a pool of one thread that updates weights beside the computation.

    If the CPU computes, the torch operators of this thread use one core; see `single_core_pool`. Beside a GPU
    they leave some cores to the threads that start kernels. On a machine with an H200 and 16 cores, updates
    on all cores made the thread of the forward two to three times slower, and the GPU waited for it. Memory
    limits updates, which need a few cores less.
    """
    return WorkerPool(1, name, use_one_core if on_cpu else leave_cores)
