"""The connection of a client to an appliance, which is made again after it broke."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

from headwater.appliance.remote.address import Address
from headwater.appliance.remote.frames import PROTOCOL, Decoder, Frame, encode
from headwater.appliance.remote.ssh import BrokenConnectionError, Failure, Process
from headwater.appliance.request_queue import answer_of
from headwater.core.errors import QueueError

_REPLY_S = 120.0
"""Seconds without a byte of a reply after which a connection counts as broken."""
_PATIENCE_S = 3600.0
_FIRST_S, _LONGEST_S = 0.2, 30.0


def delay_s(attempt: int) -> float:
    """Return the seconds to wait before an attempt to connect again; the first has number 0."""
    return float(min(_FIRST_S * 2.0 ** min(attempt, 20), _LONGEST_S))


class Connection:
    """A connection over which requests are sent one after the other.

    The first connection must succeed at once. If it breaks later, it is made again, and the request without a
    reply is sent again.

    Args:
        address: the appliance.
        say: prints a notice of the state of the connection.
        patience_s: seconds after which no further attempt to connect again is made.
    """

    def __init__(
        self,
        address: Address,
        say: Callable[[str], None] = lambda text: None,
        patience_s: float = _PATIENCE_S,
    ) -> None:
        self.address = address
        self._say = say
        self._patience_s = patience_s
        self._process: Process | None = None
        self._decoder = Decoder()
        self._was_connected = False

    def open(self) -> None:
        """Connect, if this has not been done.

        Raises:
            QueueError: if the machine cannot be reached, refuses the login, or has no Headwater, or another
                version of its protocol.
        """
        if not self._was_connected:
            self.ask("ping")

    def ask(self, request: str, body: bytes = b"", /, *, once: bool = False, **fields: object) -> Frame:
        """Send a request and return its reply.

        Args:
            request: kind of the request.
            body: bytes that belong to it.
            once: true for a request that must not be sent again after it may have been received.
            fields: its fields, as values that JSON can represent.

        Raises:
            HeadwaterError: the error that the appliance replies, or that of a connection that cannot be made
                or made again.
        """
        data = encode(Frame({"ask": request, **fields}, body))
        attempt, broke = 0, 0.0
        while True:
            sent = False
            try:
                process = self._connected()
                sent = True
                process.send(data, _REPLY_S)
                reply = self._receive(process)
            except BrokenConnectionError:
                failure = self._end()
                if sent and once:
                    raise _unknown(request) from failure.error
                broke = broke or time.monotonic()
                self._wait(failure, attempt, broke)
                attempt += 1
                continue
            except BaseException:  # Ctrl-C too: the rest of the reply would be taken for the next reply
                self.close()
                raise
            if attempt:
                self._say(f"connected again after {time.monotonic() - broke:.0f} s")
            answer_of({"answer": None, **reply.header})
            return reply

    def close(self) -> None:
        """End the connection."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def _connected(self) -> Process:
        if self._process is not None:
            return self._process
        self._process, self._decoder = Process(self.address), Decoder(skip_to_mark=True)
        hello = self._receive(self._process).header
        if hello.get("protocol") != PROTOCOL:
            self.close()
            raise _other_version(hello, self.address)
        path = {"path": self.address.path}
        self._process.send(encode(Frame({"ask": "begin", **path})), _REPLY_S)
        answer_of(self._receive(self._process).header)
        self._was_connected = True
        return self._process

    def _receive(self, process: Process) -> Frame:
        while True:
            for frame in self._decoder.feed(process.receive(_REPLY_S)):
                # There is only one frame, because the server sends one for each request.
                return frame

    def _end(self) -> Failure:
        assert self._process is not None, "the broken connection was open"
        failure = self._process.failure()
        self.close()
        return failure

    def _wait(self, failure: Failure, attempt: int, broke: float) -> None:
        """Wait before the next attempt. Raise the error if it would fail too, or if patience is over."""
        if not self._was_connected or failure.is_final or time.monotonic() > broke + self._patience_s:
            raise failure.error
        if attempt == 0:
            self._say(f"the connection to {self.address} broke; connecting again")
        time.sleep(delay_s(attempt))


def _unknown(request: str) -> QueueError:
    return QueueError(
        f"the connection broke: the request to {request} may or may not have been carried out",
        remedy="see `headwater jobs list`, then try again if necessary",
    )


def _other_version(hello: Mapping[str, Any], address: Address) -> QueueError:
    return QueueError(
        f"expected protocol {PROTOCOL} of headwater {version('headwater')}, got protocol "
        f"{hello.get('protocol')} of headwater {hello.get('version')}",
        where=str(address),
        remedy="install the same version on both machines",
    )
