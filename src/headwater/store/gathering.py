"""Copies of masters for ranks that do not update them."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from headwater.core.buffers import round_up
from headwater.core.stage import SLAB_ALIGNMENT_BYTES, ParamKey
from headwater.fabric.link import Link
from headwater.store.store import WeightStore


class Gathering:
    """Copies masters to memory that all ranks of a host share.

    The rank that updates a piece copies it to memory that the ranks of its host share. The leaders of hosts
    send each other the elements that other hosts need. All ranks make the same calls together.

    Args:
        store: holds the masters.
    """

    def __init__(self, store: WeightStore) -> None:
        self._store = store
        self._here = store.fabric.neighbours
        self._run = functools.cache(store.ownership.host_run)  # stage, parameter, host -> elements
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    @functools.cached_property
    def _link(self) -> Link | None:
        """The connection between hosts, made at the first access."""
        return self._store.fabric.connect("masters")

    def bring(self, keys: Sequence[ParamKey], to: Sequence[ParamKey] | None = None) -> list[torch.Tensor]:
        """Return copies of masters, with all updates applied, in shared memory. Callers must not change them.

        Args:
            keys: the parameters.
            to: for each of `keys`, another parameter with the same number of elements. A host needs only the
                elements at those positions that it updates in the other parameter. All elements if not given.

        Returns:
            A 1-D tensor for each of `keys`, valid until the next call.
        """
        self._here.barrier("masters to be brought")  # others may still read the memory that is reused
        masters = self._allocate(dict.fromkeys(keys))
        # All ranks use the same order, because reading a stage may wait for the ranks that update it.
        for stage in sorted({stage for stage, _ in keys}):
            wanted = {param for other, param in keys if other == stage}
            for piece in self._store.parameters.read(stage, states=(), params=wanted, mine=True):
                target = masters[stage, piece.param]
                target[piece.start : piece.start + piece.master.numel()] = piece.master
        self._here.barrier("masters of this host")
        if self._store.fabric.num_hosts > 1:
            for index, key in enumerate(keys):
                self._exchange(masters[key], key, None if to is None else to[index])
            self._here.barrier("masters of other hosts")
        return [masters[key] for key in keys]

    def release(self) -> None:
        """Release the shared memory. All ranks call this function at the same place."""
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def _allocate(self, keys: dict[ParamKey, None]) -> dict[ParamKey, torch.Tensor]:
        specs = {key: self._store.spec(key) for key in keys}
        sizes = {key: spec.numel * spec.dtype.itemsize for key, spec in specs.items()}
        total = sum(round_up(size, SLAB_ALIGNMENT_BYTES) for size in sizes.values())
        # All ranks compute the same total, so all of them allocate or none does.
        if total > self._memory.numel():
            self._memory = self._here.allocate(total)
        masters, offset = {}, 0
        for key, size in sizes.items():
            masters[key] = self._memory[offset : offset + size].view(specs[key].dtype)
            offset += round_up(size, SLAB_ALIGNMENT_BYTES)
        return masters

    def _exchange(self, master: torch.Tensor, key: ParamKey, to: ParamKey | None) -> None:
        """Send other hosts the elements that they need, and receive those that this host needs."""
        if self._link is None:
            return
        hosts, own = range(self._link.num_hosts), self._link.host
        there = [self._run(*key, host) for host in hosts]
        wanted = [range(master.numel()) if to is None else self._run(*to, host) for host in hosts]
        out = [_common(master, there[own], wanted[host]) for host in hosts]
        self._link.exchange(out, [_common(master, there[host], wanted[own]) for host in hosts])


def _common(master: torch.Tensor, there: range, wanted: range) -> torch.Tensor:
    """Return the elements of `master` that are in both ranges, as bytes. The result may be empty."""
    start = max(there.start, wanted.start)
    return master[start : max(start, min(there.stop, wanted.stop))].view(torch.uint8)
