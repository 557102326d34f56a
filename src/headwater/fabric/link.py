"""A connection of hosts: one process of each, its leader, sends and receives for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed
from torch.distributed import P2POp, ProcessGroup, batch_isend_irecv, irecv, isend

from headwater.core.errors import RankError

PIECE_BYTES = 4 << 20
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
        note_call: is called whenever a call begins; it ends within the timeout of the group.
    """

    def __init__(
        self,
        purpose: str,
        group: ProcessGroup,
        leaders: Sequence[int],
        names: Sequence[str],
        host: int,
        note_call: Callable[[], None],
    ) -> None:
        self.host = host
        self.num_hosts = len(leaders)
        self._purpose = purpose
        self._group: ProcessGroup | None = group
        self._leaders = leaders
        self._names = names
        self._note_call = note_call
        self._others = [other for other in range(self.num_hosts) if other != host]

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """The values [n] of every host, [hosts, n]."""
        every = torch.empty(self.num_hosts, *values.shape, dtype=values.dtype)
        with self._calling(*self._others):
            torch.distributed.all_gather(list(every), values.contiguous(), group=self._group)
        return every

    def exchange(self, out: Sequence[torch.Tensor], into: Sequence[torch.Tensor]) -> None:
        """Send each host what is for it, and receive what each has for this one, all at once.

        Args:
            out: uint8, contiguous, by host.
            into: likewise, as long as what that host sends; nothing of this host itself.
        """
        self.start_exchange(out, into)()

    def start_exchange(self, out: Sequence[torch.Tensor], into: Sequence[torch.Tensor]) -> Callable[[], None]:
        """Begin an `exchange`; what is returned ends it.

        Receiving is prepared before sending: over TCP only then both directions are as fast as one.
        """
        others = self._others
        operations = [self._operation(irecv, piece, host) for host in others for piece in _pieces(into[host])]
        operations += [self._operation(isend, piece, host) for host in others for piece in _pieces(out[host])]
        with self._calling(*self._others):
            works = batch_isend_irecv(operations) if operations else []

        def finish() -> None:
            with self._calling(*self._others):
                for work in works:
                    work.wait()

        return finish

    def _operation(self, kind: Callable[..., object], data: torch.Tensor, host: int) -> P2POp:
        return P2POp(kind, data, self._leaders[host], self._group)

    def send(self, data: torch.Tensor, host: int) -> None:
        """Send a contiguous tensor to a host, which calls `receive`."""
        with self._calling(host):
            torch.distributed.send(data, self._leaders[host], group=self._group)

    def receive(self, data: torch.Tensor, host: int) -> None:
        """Fill a contiguous tensor with what a host sends."""
        with self._calling(host):
            torch.distributed.recv(data, self._leaders[host], group=self._group)

    def close(self) -> None:
        """Give back the connections."""
        group, self._group = self._group, None
        if group is not None:
            torch.distributed.destroy_process_group(group)

    @contextmanager
    def _calling(self, *hosts: int) -> Iterator[None]:
        self._note_call()
        try:
            yield
        except RuntimeError as error:
            others = " or ".join(self._names[host] for host in hosts)
            raise RankError(
                f"host {self._names[self.host]} cannot reach {others} for {self._purpose}: {error}",
                remedy="see whether the hosts run and reach each other; "
                "the run goes on from its last complete checkpoint",
            ) from error


def _pieces(data: torch.Tensor) -> Sequence[torch.Tensor]:
    return data.split(PIECE_BYTES) if data.numel() else ()
