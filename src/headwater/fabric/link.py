"""A connection between hosts. The leader of each host sends and receives for all ranks of the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from headwater.core.errors import RankError
from headwater.fabric.mesh import Mesh
from headwater.fabric.values import gather_values


class Link:
    """A connection of the leaders of all hosts for one purpose.

    All leaders make the same calls in the same order. Calls on different links may overlap.

    Args:
        purpose: the purpose of the link, for messages.
        mesh: the leaders of all hosts.
        names: the names of the hosts, by index.
        host: index of this host.
        note_call: called at the beginning of each call. A call ends within the timeout of the mesh.
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
        """Return the values [n] of every host as [hosts, n]."""
        with self._calling(*self._others):
            return torch.stack(gather_values(self._mesh, values, torch.Tensor))

    def exchange(self, out: Sequence[torch.Tensor], into: Sequence[torch.Tensor]) -> None:
        """Send a tensor to each other host and receive one from each, all at once.

        Args:
            out: uint8, contiguous, by host. The entry of this host is ignored.
            into: the tensors to fill, as long as what each host sends. The entry of this host is ignored.
        """
        self.start_exchange(out, into)()

    def start_exchange(self, out: Sequence[torch.Tensor], into: Sequence[torch.Tensor]) -> Callable[[], None]:
        """Begin an `exchange`; return a function that waits for its end.

        The receives are started before the sends. Otherwise TCP slows down when both directions are busy.
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
        """Send a contiguous tensor to a host, which must call `receive`."""
        with self._calling(host):
            self._mesh.start({host: [data]}, {})()

    def receive(self, data: torch.Tensor, host: int) -> None:
        """Fill a contiguous tensor with the data that a host sends."""
        with self._calling(host):
            self._mesh.start({}, {host: [data]})()

    def close(self) -> None:
        """Close the connections."""
        self._mesh.close()

    @contextmanager
    def _calling(self, *hosts: int) -> Iterator[None]:
        # Other ranks of this host may wait for the leader. They extend their timeout during this call.
        self._note_call()
        try:
            yield
        except OSError as error:
            others = " or ".join(self._names[host] for host in hosts)
            raise RankError(
                f"host {self._names[self.host]} cannot reach {others} for {self._purpose}: {error}",
                remedy="check that the hosts run and reach each other; "
                "the run continues from its last complete checkpoint",
            ) from error
