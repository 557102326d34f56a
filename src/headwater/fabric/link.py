"""A connection of hosts: one process of each, its leader, sends and receives for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from headwater.core.errors import RankError
from headwater.fabric.codec import decode, encode
from headwater.fabric.mesh import Mesh

PIECE_BYTES = 4 << 20
"""What is best sent at once: several of them overlap with what is done to each."""


class Link:
    """What the leaders of all hosts send each other for one purpose, one call after the other.

    All of them make the same calls in the same order. Calls on several links may overlap.

    Args:
        purpose: what it is for; for messages.
        mesh: the leaders of all hosts.
        names: of the hosts.
        host: this one.
        note_call: is called whenever a call begins; it ends within the timeout of the group.
    """

    def __init__(
        self,
        purpose: str,
        mesh: Mesh,
        names: Sequence[str],
        host: int,
        note_call: Callable[[], None],
    ) -> None:
        self.host = host
        self.num_hosts = mesh.size
        self._purpose = purpose
        self._mesh = mesh
        self._names = names
        self._note_call = note_call
        self._others = [other for other in range(self.num_hosts) if other != host]

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """The values [n] of every host, [hosts, n]."""
        with self._calling(*self._others):
            messages = self._mesh.gather(encode(values, torch.Tensor))
        return torch.stack([decode(message, torch.Tensor) for message in messages])

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
        with self._calling(*others):
            wait = self._mesh.start(
                {host: [out[host]] for host in others}, {host: [into[host]] for host in others}
            )

        def finish() -> None:
            with self._calling(*others):
                wait()

        return finish

    def send(self, data: torch.Tensor, host: int) -> None:
        """Send a contiguous tensor to a host, which calls `receive`."""
        with self._calling(host):
            self._mesh.start({host: [data]}, {})()

    def receive(self, data: torch.Tensor, host: int) -> None:
        """Fill a contiguous tensor with what a host sends."""
        with self._calling(host):
            self._mesh.start({}, {host: [data]})()

    def close(self) -> None:
        """Give back the connections."""
        self._mesh.close()

    @contextmanager
    def _calling(self, *hosts: int) -> Iterator[None]:
        self._note_call()
        try:
            yield
        except OSError as error:
            others = " or ".join(self._names[host] for host in hosts)
            raise RankError(
                f"host {self._names[self.host]} cannot reach {others} for {self._purpose}: {error}",
                remedy="see whether the hosts run and reach each other; "
                "the run goes on from its last complete checkpoint",
            ) from error
