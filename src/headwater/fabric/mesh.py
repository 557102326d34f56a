"""A group of ranks with one connection between every two of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import final

import torch

from headwater.core.recorder import COLLECTIVE, RECORDER
from headwater.fabric.connection import Connection
from headwater.fabric.switchboard import Switchboard


@final
class Mesh:
    """A group of ranks. All members make the same calls in the same order, one after the other.

    Connections are made when they are first used. A failed connection raises `OSError`. A damaged message, or
    an answer by a process that is not a rank, raises `RankError`.

    Args:
        switchboard: the connections of this rank.
        ranks: the members. They address each other by their index in this list.
        timeout_s: seconds to wait for another member.
        purpose: a name that no other mesh has.
    """

    def __init__(
        self, switchboard: Switchboard, ranks: Sequence[int], timeout_s: float, purpose: str
    ) -> None:
        self.size = len(ranks)
        self.own = list(ranks).index(switchboard.rank) if switchboard.rank in ranks else None
        self._timeout_s = timeout_s
        self._switchboard = switchboard
        self._ranks = list(ranks)
        self._purpose = purpose
        self._connections: dict[int, Connection] = {}

    def gather(self, message: bytes) -> list[bytes | bytearray]:
        """Send `message` to every member, and return the messages of all members."""
        return self.exchange([message] * self.size)

    def exchange(self, messages: Sequence[bytes]) -> list[bytes | bytearray]:
        """Send each member its message, and return what each member sends to this one."""
        with RECORDER.span(COLLECTIVE, num_bytes=sum(map(len, messages))):
            return self._exchange(messages)

    def _exchange(self, messages: Sequence[bytes]) -> list[bytes | bytearray]:
        others = self._others()
        # All sends begin before the first receive. Otherwise members with long messages wait for each other.
        sending = [self._to(other).send_message(messages[other]) for other in others]
        received: list[bytes | bytearray] = [messages[index] for index in range(self.size)]
        for other in others:
            # Messages are received in the order of the members, in whatever order they arrive.
            received[other] = self._to(other).receive_message()
        # This waits for the sends after the receives. Before them, all members could block forever in sends.
        _finish(sending)
        return received

    def broadcast(self, message: bytes | None, source: int) -> bytes | bytearray:
        """Return the message of the member `source`; the other members pass `None`."""
        with RECORDER.span(COLLECTIVE) as span:
            whole = self._broadcast(message, source)
            span.num_bytes = len(whole)
        return whole

    def _broadcast(self, message: bytes | None, source: int) -> bytes | bytearray:
        if self.own != source:
            return self._to(source).receive_message()
        assert message is not None, "the source of a broadcast has a message"
        _finish([self._to(other).send_message(message) for other in self._others()])
        return message

    def start(
        self, out: Mapping[int, Sequence[torch.Tensor]], into: Mapping[int, Sequence[torch.Tensor]]
    ) -> Callable[[], None]:
        """Begin to send and receive contiguous tensors of known sizes.

        Args:
            out: the tensors for each other member.
            into: the tensors to fill with what each other member sends.

        Returns:
            A function that blocks until all is sent and received.
        """
        receiving = [
            self._to(other).receive(_bytes(each)) for other, pieces in into.items() for each in pieces
        ]
        sending = [self._to(other).send(_bytes(each)) for other, pieces in out.items() for each in pieces]
        num_bytes = sum(each.nbytes for pieces in (*out.values(), *into.values()) for each in pieces)

        def finish() -> None:
            with RECORDER.span(COLLECTIVE, num_bytes=num_bytes):
                _finish([*receiving, *sending])

        return finish

    def close(self) -> None:
        """Close the connections. Calls that wait for other members fail."""
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    def _others(self) -> list[int]:
        assert self.own is not None, "only a member uses the mesh"
        return [other for other in range(self.size) if other != self.own]

    def _to(self, other: int) -> Connection:
        if other not in self._connections:
            self._connections[other] = self._switchboard.connect(
                self._purpose, self._ranks[other], self._timeout_s
            )
        return self._connections[other]


def _finish(futures: Sequence[Future[None]]) -> None:
    for future in futures:
        future.result()


def _bytes(data: torch.Tensor) -> memoryview:
    return memoryview(data.detach().reshape(-1).view(torch.uint8).numpy().data)
