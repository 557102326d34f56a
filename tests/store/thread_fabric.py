"""Ranks that are threads of one process."""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch

from headwater.core.placement import Placement
from headwater.fabric.codec import decode, encode
from headwater.fabric.fabric import Fabric


class _Shared:
    def __init__(self, size):
        self.memory, self.lock = [], threading.Lock()
        self.barrier, self.values = threading.Barrier(size), [None] * size


class ThreadFabric(Fabric):
    """A rank that is a thread; `ranks` starts them."""

    def __init__(self, rank: int, size: int, shared: _Shared) -> None:
        self.rank = self.local_rank = rank
        self.placement, self.local_size = Placement(size), size
        self.hosts: Sequence[int] = [0] * size
        self._shared, self._allocated = shared, 0

    def allocate(self, num_bytes: int) -> torch.Tensor:
        with self._shared.lock:
            if self._allocated == len(self._shared.memory):
                self._shared.memory.append(torch.zeros(num_bytes, dtype=torch.uint8))
        self._allocated += 1
        return self._shared.memory[self._allocated - 1]

    def connect(self, purpose: str) -> None:
        return None

    def exclusive(self):
        return nullcontext()

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + 200
        while not condition():
            assert time.monotonic() < end, f"{what} never came"
            time.sleep(1e-4)

    def barrier(self, what: str) -> None:
        self._shared.barrier.wait(200)

    def gather(self, value, what=""):
        return self.gather_objects(value, float)

    def gather_objects(self, value, kind, what=""):
        value = encode(value, kind)
        self._shared.values[self.rank] = value
        self.barrier("all values")
        values = [decode(each, kind) for each in self._shared.values]
        self.barrier("all to have read them")
        return values

    def gather_tensors(self, value):
        return self.gather_objects(value, torch.Tensor)

    def agree(self, make, kind, what=""):
        (value,) = self.gather_objects([make()] if self.rank == 0 else [], list[kind])[0]
        return value

    def close(self) -> None:
        pass


def ranks(size: int, program: Callable[[Fabric], object]) -> list[object]:
    """Return the results of `program` on each rank."""
    shared, results = _Shared(size), [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = program(ThreadFabric(rank, size, shared))
        except BaseException as error:  # noqa: BLE001 `ranks` raises it in the calling thread
            errors.append(error)
            shared.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
