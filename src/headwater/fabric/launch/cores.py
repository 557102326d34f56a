"""The CPU cores that this process may use, and their division among ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headwater.core.placement import check_csx_limit

_NODES = Path("/sys/devices/system/node")


def num_cores() -> int:
    """Return how many cores this process may use, which is also the largest number of compute ranks."""
    return len(os.sched_getaffinity(0))


def check_cores(num_csx: int, *, where: str) -> None:
    """Raise `ConfigError` if this process may use fewer than `num_csx` cores."""
    check_csx_limit(num_csx, num_cores(), "cores of this machine", where=where)


def cores_of_ranks(count: int) -> list[set[int]] | None:
    """Divide the cores among `count` ranks. Return `None` on a machine with one NUMA node.

    The cores of all nodes form one list, node after node, and each rank gets consecutive cores of this list.
    Linux allocates memory on the node of the thread that first writes to it, so the memory of a rank is on
    the node of its cores.
    """
    # `os.cpu_count` would count cores that a container or `taskset` does not allow.
    allowed = os.sched_getaffinity(0)
    nodes = [node for path in _NODES.glob("node[0-9]*/cpulist") if (node := _cores(path) & allowed)]
    if len(nodes) < 2:
        return None
    cores = [core for node in sorted(nodes, key=min) for core in sorted(node)]
    return [
        set(cores[rank * len(cores) // count : (rank + 1) * len(cores) // count]) for rank in range(count)
    ]


@contextmanager
def bound_to(cores: set[int] | None) -> Iterator[None]:
    """Enter a context in which this thread starts processes that run on `cores`; `None`: on any core."""
    if cores is None:
        yield
        return
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)


def _cores(cpulist: Path) -> set[int]:
    """Return the cores of a list such as `0-3,8-11`."""
    spans = [span.split("-") for span in cpulist.read_text().strip().split(",") if span]
    return {core for span in spans for core in range(int(span[0]), int(span[-1]) + 1)}
