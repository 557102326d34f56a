"""A connection of hosts: one process of each, its leader, sends and receives for all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed
from torch.distributed import ProcessGroup

from headwater.core.errors import RankError

PIECE_BYTES = 8 << 20
"""What is sent at once, at most: larger messages and much smaller ones are slower over TCP."""


class Link:
    """What the leaders of all hosts send each other for one purpose, one call after the other.

    All of them make the same calls in the same order. Calls on several links may overlap.

    Args:
        purpose: what it is for; for messages.
        group: their process group.
        leaders: the rank of each host's leader.
        names: of the hosts.
        host: this one.
    """

    def __init__(
        self, purpose: str, group: ProcessGroup, leaders: Sequence[int], names: Sequence[str], host: int
    ) -> None:
        self.host = host
        self.num_hosts = len(leaders)
        self._purpose = purpose
        self._group = group
        self._leaders = leaders
        self._names = names

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """The values [n] of every host, [hosts, n]."""
        every = torch.empty(self.num_hosts, *values.shape, dtype=values.dtype)
        with self._errors("all hosts"):
            torch.distributed.all_gather(list(every), values.contiguous(), group=self._group)
        return every

    def exchange(self, parts: Sequence[torch.Tensor], num_bytes: int) -> list[torch.Tensor]:
        """Send each host its part, and receive as much from each.

        Args:
            parts: uint8, by host; that of this host is empty.
            num_bytes: how much each of the others sends this host.

        Returns:
            What they have sent, by host; of this host nothing.
        """
        expected = [0 if host == self.host else num_bytes for host in range(self.num_hosts)]
        sent, received = torch.cat(list(parts)), torch.empty(sum(expected), dtype=torch.uint8)
        with self._errors("all hosts"):
            torch.distributed.all_to_all_single(
                received, sent, expected, [part.numel() for part in parts], group=self._group
            )
        return list(received.split(expected))

    def broadcast(self, data: torch.Tensor, host: int) -> None:
        """Let all hosts have what `host` has in `data` (uint8, contiguous), piece by piece."""
        with self._errors(f"host {self._names[host]}"):
            for piece in data.split(PIECE_BYTES):
                torch.distributed.broadcast(piece, self._leaders[host], group=self._group)

    def send(self, data: torch.Tensor, host: int) -> None:
        """Send a contiguous tensor to a host, which calls `receive`."""
        with self._errors(f"host {self._names[host]}"):
            torch.distributed.send(data, self._leaders[host], group=self._group)

    def receive(self, data: torch.Tensor, host: int) -> None:
        """Fill a contiguous tensor with what a host sends."""
        with self._errors(f"host {self._names[host]}"):
            torch.distributed.recv(data, self._leaders[host], group=self._group)

    @contextmanager
    def _errors(self, other: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise RankError(
                f"host {self._names[self.host]} cannot reach {other} for {self._purpose}: {error}",
                remedy="see whether the hosts run and reach each other; "
                "the run goes on from its last complete checkpoint",
            ) from error
