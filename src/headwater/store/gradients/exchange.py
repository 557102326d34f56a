"""The exchange of gradient sums between hosts: what each host sends, and how the sums are added up."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, final

import torch

from headwater.core.stage import ParamKey, StageSpec
from headwater.core.tensor_values import in_dtype
from headwater.fabric.fabric import PIECE_BYTES

if TYPE_CHECKING:
    from headwater.fabric.link import Link
    from headwater.store.gradients.storage import GradientStorage

Runs = list[tuple[ParamKey, int, int]]
"""Ranges of elements, each as (parameter, first element, one past the last element)."""


@final
class Exchange:
    """Adds up the gradient sums of several hosts. The leaders of all hosts make the same calls.

    Values are sent in pieces, in the dtype in which autograd makes gradients (`ParamSpec.gradient_dtype`).
    They are added up in fp32 or wider, in the order of the hosts, so the bits are the same in every run.

    Args:
        link: the connection of the leaders.
        storage: the sums of this host.
        stages: the stages.
    """

    def __init__(self, link: Link, storage: GradientStorage, stages: Sequence[StageSpec]) -> None:
        self._link = link
        self._storage = storage
        self._dtypes = storage.sizes.dtypes
        self._made_dtypes = {key: stages[key[0]].params[key[1]].gradient_dtype for key in self._dtypes}

    def reduce(self, runs: Sequence[Runs]) -> None:
        """Replace the sums in this host's ranges by the totals over all hosts.

        Args:
            runs: the ranges of each host, the same on every host.
        """
        parts = self._pieces(runs, self._made_dtypes)
        started = [self._start_reducing(part) for part in parts[:1]]
        for part, following in itertools.zip_longest(parts, parts[1:]):
            if following is not None:  # the next piece is sent while this one is summed
                started.append(self._start_reducing(following))
            self._add_up(part[self._link.host], started.pop(0)())

    def spread(self, runs: Sequence[Runs]) -> None:
        """Copy the sums in each host's ranges to all other hosts.

        Args:
            runs: the ranges of each host, the same on every host.
        """
        for part in self._pieces(runs, self._dtypes):
            own = self._packed(part[self._link.host], self._dtypes)
            received = [
                torch.empty(_num_bytes(its, self._dtypes), dtype=torch.uint8, device="cpu") for its in part
            ]
            self._link.exchange([own] * len(part), received)
            for host, (its, data) in enumerate(zip(part, received, strict=True)):
                if host != self._link.host:
                    self._unpack(its, data)

    def _pieces(self, runs: Sequence[Runs], dtypes: Mapping[ParamKey, torch.dtype]) -> list[list[Runs]]:
        """Return the ranges of all hosts, cut so that each has at most about `PIECE_BYTES` bytes."""
        count = -(-max(_num_bytes(its, dtypes) for its in runs) // PIECE_BYTES)
        return [[divide(its, piece, count) for its in runs] for piece in range(count)]

    def _start_reducing(self, runs: Sequence[Runs]) -> Callable[[], list[torch.Tensor]]:
        """Start to send each host its ranges. Return a function that waits for this host's values."""
        num_bytes = _num_bytes(runs[self._link.host], self._made_dtypes)
        sent = [self._packed(its, self._made_dtypes) for its in runs]
        received = [torch.empty(num_bytes, dtype=torch.uint8, device="cpu") for _ in runs]
        finish = self._link.start_exchange(sent, received)

        def finished() -> list[torch.Tensor]:
            # The sent copies must live until here.
            finish()
            sent.clear()
            return received

        return finished

    def _add_up(self, runs: Runs, received: Sequence[torch.Tensor]) -> None:
        """Add the values that other hosts have sent to the sums in this host's ranges."""
        position = 0
        for key, start, stop in runs:
            own, dtype = self._storage.read(key, start, stop), self._made_dtypes[key]
            span = slice(position, position + own.numel() * dtype.itemsize)
            position = span.stop
            total = torch.zeros(
                own.numel(), dtype=torch.promote_types(own.dtype, torch.float32), device="cpu"
            )
            for host, theirs in enumerate(received):
                total += own if host == self._link.host else in_dtype(theirs[span], dtype)
            # The sum is rounded once, after all hosts were added.
            self._storage.write(key, total, start)

    def _packed(self, runs: Runs, dtypes: Mapping[ParamKey, torch.dtype]) -> torch.Tensor:
        own = (self._storage.read(key, start, stop).to(dtypes[key]) for key, start, stop in runs)
        parts = [values.view(torch.uint8) for values in own]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device="cpu")

    def _unpack(self, runs: Runs, data: torch.Tensor) -> None:
        position = 0
        for key, start, stop in runs:
            dtype = self._dtypes[key]
            span = slice(position, position + (stop - start) * dtype.itemsize)
            self._storage.write(key, in_dtype(data[span], dtype), start)
            position = span.stop


def _num_bytes(runs: Runs, dtypes: Mapping[ParamKey, torch.dtype]) -> int:
    return sum((stop - start) * dtypes[key].itemsize for key, start, stop in runs)


def divide(runs: Runs, part: int, count: int) -> Runs:
    """Divide ranges into `count` parts with about equally many elements. Return part number `part`.

    Args:
        runs: runs of elements, in any order.
        part: from 0 to `count - 1`.
        count: number of parts. Together, in order, they are the runs.
    """
    total = sum(stop - start for _, start, stop in runs)
    first, last = total * part // count, total * (part + 1) // count
    found, before = [], 0
    for key, start, stop in runs:
        low, high = max(first - before, 0), min(last - before, stop - start)
        if low < high:
            found.append((key, start + low, start + high))
        before += stop - start
    return found
