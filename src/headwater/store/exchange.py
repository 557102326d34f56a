"""Sums of gradients between hosts: what each sends the others, and how it is added up."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import torch

from headwater.fabric.link import PIECE_BYTES, Link
from headwater.store.gradients import ParamKey
from headwater.store.sums import Sums

Runs = list[tuple[ParamKey, int, int]]
"""Elements of parameters: first, and one past the last."""


class Exchange:
    """Adds up what the hosts have in their sums; the leaders of all of them make the same calls.

    What travels is in the wire's dtype, in pieces, and is added up in fp32 in the order of the hosts: so the
    bits are the same each time.

    Args:
        link: by which the hosts send.
        sums: of this host.
        wire_dtypes: of the parameters.
    """

    def __init__(self, link: Link, sums: Sums, wire_dtypes: Mapping[ParamKey, torch.dtype]) -> None:
        self._link = link
        self._sums = sums
        self._wire_dtypes = wire_dtypes

    def reduce(self, runs: Sequence[Runs]) -> None:
        """Let the sums of this host's runs be those of all hosts.

        Args:
            runs: of each host, the same everywhere.
        """
        parts = self._pieces(runs, self._wire_dtypes)
        started = [self._start_reducing(part) for part in parts[:1]]
        for part, following in itertools.zip_longest(parts, parts[1:]):
            if following is not None:  # is on its way while this one is summed
                started.append(self._start_reducing(following))
            self._add_up(part[self._link.host], started.pop(0)())

    def spread(self, runs: Sequence[Runs]) -> None:
        """Let every host have what each has in its runs.

        Args:
            runs: as for `reduce`.
        """
        for part in self._pieces(runs, self._sums.dtypes):
            own = self._packed(part[self._link.host], self._sums.dtypes)
            received = [torch.empty(_num_bytes(its, self._sums.dtypes), dtype=torch.uint8) for its in part]
            self._link.exchange([own] * len(part), received)
            for host, (its, data) in enumerate(zip(part, received, strict=True)):
                if host != self._link.host:
                    self._unpack(its, data)

    def _pieces(self, runs: Sequence[Runs], dtypes: Mapping[ParamKey, torch.dtype]) -> list[list[Runs]]:
        """The runs of all hosts, a piece after the other."""
        count = -(-max(_num_bytes(its, dtypes) for its in runs) // PIECE_BYTES)
        return [[divide(its, piece, count) for its in runs] for piece in range(count)]

    def _start_reducing(self, runs: Sequence[Runs]) -> Callable[[], list[torch.Tensor]]:
        """Send each host its runs; what is returned gives what each sends for the runs of this host."""
        num_bytes = _num_bytes(runs[self._link.host], self._wire_dtypes)
        sent = [self._packed(its, self._wire_dtypes) for its in runs]
        received = [torch.empty(num_bytes, dtype=torch.uint8) for _ in runs]
        finish = self._link.start_exchange(sent, received)

        def finished() -> list[torch.Tensor]:
            finish()
            sent.clear()
            return received

        return finished

    def _add_up(self, runs: Runs, received: Sequence[torch.Tensor]) -> None:
        """Add up what the hosts have for the runs of this one."""
        position = 0
        for key, start, stop in runs:
            own, dtype = self._sums.read(key, start, stop), self._wire_dtypes[key]
            span = slice(position, position + own.numel() * dtype.itemsize)
            position = span.stop
            total = torch.zeros(own.numel(), dtype=torch.promote_types(own.dtype, torch.float32))
            for host, theirs in enumerate(received):
                total += own if host == self._link.host else _typed(theirs[span], dtype)
            self._sums.write(key, total, start)

    def _packed(self, runs: Runs, dtypes: Mapping[ParamKey, torch.dtype]) -> torch.Tensor:
        own = (self._sums.read(key, start, stop).to(dtypes[key]) for key, start, stop in runs)
        parts = [values.view(torch.uint8) for values in own]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)

    def _unpack(self, runs: Runs, data: torch.Tensor) -> None:
        position = 0
        for key, start, stop in runs:
            dtype = self._sums.dtypes[key]
            span = slice(position, position + (stop - start) * dtype.itemsize)
            self._sums.write(key, _typed(data[span], dtype), start)
            position = span.stop


def _typed(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bytes as numbers; those that lie between the places of such numbers are moved."""
    return (data.clone() if data.storage_offset() % dtype.itemsize else data).view(dtype)


def _num_bytes(runs: Runs, dtypes: Mapping[ParamKey, torch.dtype]) -> int:
    return sum((stop - start) * dtypes[key].itemsize for key, start, stop in runs)


def divide(runs: Runs, part: int, count: int) -> Runs:
    """One of so many parts of runs that have about equally many elements."""
    total = sum(stop - start for _, start, stop in runs)
    first, last = total * part // count, total * (part + 1) // count
    found, before = [], 0
    for key, start, stop in runs:
        low, high = max(first - before, 0), min(last - before, stop - start)
        if low < high:
            found.append((key, start + low, start + high))
        before += stop - start
    return found
