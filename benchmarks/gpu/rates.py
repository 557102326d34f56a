"""The rates of a machine with a GPU: copies each way and both at once, memory, updates, and products."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import torch

from benchmarks.runner import Row
from headwater.core.buffers import aligned_empty
from headwater.plan.calibrate import calibrate
from headwater.stream.device import Device
from headwater.stream.devices import make_device


class Rates:
    """Measures rates, each as the best of a few runs.

    Args:
        device: `cuda` or `cpu`.
        copied: bytes of a copy.
        updated: parameters of an update in host memory.
        products: rows, inner size and columns of a product.
    """

    def __init__(self, device: str, *, copied: int, updated: int, products: tuple[int, int, int]) -> None:
        self._name = device
        self._device: Device = make_device(device)
        self._copied, self._updated, self._products = copied, updated, products

    def rows(self) -> dict[str, Callable[[], Row]]:
        """Return the functions that measure, by the names of their rows."""
        return {
            "copies to the device": lambda: self._copies(down=1, up=0),
            "copies to the host": lambda: self._copies(down=0, up=1),
            "copies both ways at once": lambda: self._copies(down=1, up=1),
            "copies in chunks of 16 MiB": lambda: self._copies(down=1, up=0, chunk=16 << 20),
            "page-locking": self._page_locking,
            "copy within host memory": lambda: self._memory("cpu"),
            "copy within device memory": lambda: self._memory(self._name),
            "fused AdamW in host memory": self._adamw,
            "products in bf16": lambda: self._product(torch.bfloat16),
            "products in fp32": lambda: self._product(torch.float32),
            "rates of the planner": self._planner,
        }

    def _best_s(self, run: Callable[[], object], times: int = 5) -> float:
        best = float("inf")
        for _ in range(1 + times):  # the first one warms up
            begin = time.perf_counter()
            run()
            if self._name == "cuda":
                torch.cuda.synchronize()
            best = min(best, time.perf_counter() - begin)
        return best

    def _copies(self, *, down: int, up: int, chunk: int | None = None) -> Row:
        host = [aligned_empty(self._copied) for _ in range(2)]
        for each in host:
            each.fill_(1)  # pages that were never written are all the same page
        unlock = self._device.page_lock(host)
        there = [self._device.allocate_slab(self._copied) for _ in range(2)]
        streams = [self._device.new_stream() for _ in range(2)]
        pairs = [(there[0], host[0], streams[0])] * down + [(host[1], there[1], streams[1])] * up

        def run() -> None:
            for target, source, stream in pairs:
                size = chunk or self._copied
                for one, other in zip(target.split(size), source.split(size), strict=True):
                    stream.copy(one, other)
            for _, _, stream in pairs:
                stream.record().synchronize()

        try:
            return {"gb_per_s": _giga((down + up) * self._copied / self._best_s(run))}
        finally:
            unlock()

    def _page_locking(self) -> Row:
        memory = aligned_empty(self._copied)
        memory.fill_(1)

        def run() -> None:
            self._device.page_lock([memory])()

        return {"gb_per_s": _giga(self._copied / self._best_s(run, 2))}

    def _memory(self, device: str) -> Row:
        source = torch.ones(self._copied, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        return {"gb_per_s": _giga(2 * self._copied / self._best_s(lambda: target.copy_(source)))}

    def _adamw(self) -> Row:
        param = torch.zeros(self._updated, requires_grad=True)
        param.grad = torch.full_like(param, 1e-3)
        seconds = self._best_s(torch.optim.AdamW([param], fused=True).step, 3)
        return {"params_per_s": _giga(self._updated / seconds), "threads": torch.get_num_threads()}

    def _product(self, dtype: torch.dtype) -> Row:
        rows, inner, columns = self._products
        left = torch.randn(rows, inner, device=self._name).to(dtype)
        right = torch.randn(inner, columns, device=self._name).to(dtype)
        seconds = self._best_s(lambda: left @ right)
        return {"tflops": round(2 * rows * inner * columns / seconds / 1e12, 3)}

    def _planner(self) -> Row:
        rates = calibrate(self._name, None, recalibrate=True)
        return {"rates": None if rates is None else dataclasses.asdict(rates)}


def _giga(per_s: float) -> float:
    return round(per_s / 1e9, 3)
