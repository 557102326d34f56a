"""The main program of a process that measures the time of one block, eager and compiled.

`python -m headwater.stream.block_probe PARENT` reads one line of JSON and a packed call on stdin, and prints
the times as JSON. It exits when its parent process, which has the ID PARENT, exits.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from headwater.core.arithmetic import Kernels
from headwater.core.kernels import context_of
from headwater.core.precision import Precision, PrecisionName, autocast
from headwater.fabric.parent import end_with
from headwater.plan.compilation import BlockTimes
from headwater.plan.machine import resident_bytes
from headwater.stream.block_call import BlockCall, unpack
from headwater.stream.compilation import compile_forward, use_private_cache

_LEAST_ROUNDS, _MOST_ROUNDS, _BUDGET_S = 6, 60, 8.0


@dataclasses.dataclass(frozen=True)
class Conditions:
    """The settings of a measurement.

    Attributes:
        device: `cpu` or `cuda`.
        precision: name of the precision.
        threads: threads of torch.
        kernels: the kernels of matrix products.
        path: folders of Python modules.
    """

    device: str
    precision: PrecisionName
    threads: int
    kernels: Kernels
    path: list[str]


def main() -> None:
    """Print the times of the block on stdin."""
    end_with(int(sys.argv[1]))
    with suppress(OSError):
        # If memory is short, the system ends this process, and not the run.
        Path("/proc/self/oom_score_adj").write_text("1000")
    # The block's code may print lines. They go to stderr, because stdout must contain only the times.
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    conditions = Conditions(**json.loads(sys.stdin.buffer.readline()))
    sys.path[:] = conditions.path  # the block's class may be in a folder of the user
    torch.set_num_threads(conditions.threads)
    use_private_cache()
    times = measure(unpack(sys.stdin.buffer, conditions.device), conditions)
    with answer:
        json.dump(dataclasses.asdict(times), answer)


def measure(call: BlockCall, conditions: Conditions) -> BlockTimes:
    """Return the times of a block. Its forward is eager again afterwards."""

    def run() -> tuple[float, float]:
        return _run(call, conditions)

    with context_of(conditions.kernels, conditions.device)():
        run()  # the first run of a kernel takes longer
        before = resident_bytes()
        start_s = time.perf_counter()
        restore = compile_forward(call.block, type(call.block).__name__)
        compiled = call.block.forward
        run()
        compile_s = time.perf_counter() - start_s
        run()
        compiler_bytes = max(0, resident_bytes() - before)
        restore()
        eager_runs, compiled_runs = _rounds(call.block, compiled, run)
    eager, fast = _best(eager_runs), _best(compiled_runs)
    halves = [sum(_best(eager_runs[half::2])) for half in (0, 1)]
    noise = max(halves) / min(halves) - 1
    return BlockTimes(*eager, *fast, noise, compile_s, compiler_bytes)


def _rounds(
    block: torch.nn.Module, compiled: Callable[..., Any], run: Callable[[], tuple[float, float]]
) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Return the times of eager and of compiled runs. They alternate: a slower machine slows both."""
    eager_runs: list[tuple[float, float]] = []
    compiled_runs: list[tuple[float, float]] = []
    eager, end_s = block.forward, time.perf_counter() + _BUDGET_S
    while len(eager_runs) < _LEAST_ROUNDS or (len(eager_runs) < _MOST_ROUNDS and time.perf_counter() < end_s):
        for forward, runs in ((eager, eager_runs), (compiled, compiled_runs)):
            block.forward = forward
            runs.append(run())
    return eager_runs, compiled_runs


def _run(call: BlockCall, conditions: Conditions) -> tuple[float, float]:
    """Run forward and backward once, and return the seconds of both."""
    call.block.zero_grad(set_to_none=True)
    for leaf in tree_leaves((call.args, call.kwargs)):
        if isinstance(leaf, torch.Tensor):
            leaf.grad = None
    start_s = _clock(conditions)
    with autocast(Precision(conditions.precision), conditions.device):
        output = call.block(*call.args, **call.kwargs)
    middle_s = _clock(conditions)
    results = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    torch.autograd.backward(results, [torch.ones_like(leaf) for leaf in results])
    return middle_s - start_s, _clock(conditions) - middle_s


def _clock(conditions: Conditions) -> float:
    """Return a time in seconds, after all work that was queued before."""
    if conditions.device == "cpu":
        # CPU time: other programs of the machine must not change the choice.
        return time.process_time() / conditions.threads
    torch.cuda.synchronize()
    return time.perf_counter()


def _best(runs: list[tuple[float, float]]) -> tuple[float, float]:
    """Return the shortest forward and the shortest backward."""
    return min(forward for forward, _ in runs), min(backward for _, backward in runs)


if __name__ == "__main__":
    main()
