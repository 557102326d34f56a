"""All connections of a rank: it listens, and authenticates every process that connects."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import threading
import time
from collections.abc import Iterable, Sequence
from typing import final

from headwater.core.cleanup import on_failure
from headwater.core.errors import RankError
from headwater.fabric.connection import Connection
from headwater.fabric.handshake import Keys, StrangerError, examine, introduce, purpose_digest

Address = str | tuple[str, int]
"""The hexadecimal name of a socket in the abstract namespace of a host, or a network address and a port."""

_HANDSHAKE_S = 10.0
_POLL_S = 0.1
_MAX_STRANGERS = 64
"""The most connections that are authenticated at a time. Further ones are closed; their ranks try again."""


def listen_on_host(backlog: int) -> socket.socket:
    """Return a socket that processes of this host alone can reach, under a name that the system chooses."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("")
    listener.listen(backlog)
    return listener


def listen_at(address: str, port: int, backlog: int) -> socket.socket:
    """Return a socket that listens at one network address.

    Args:
        address: host name or address; "" for all interfaces of this host.
        port: number of the port; 0 for a free one.
        backlog: how many connections may wait until they are accepted.

    Raises:
        OSError: if the address is not of this host, or the port is taken.
    """
    family, *_, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    listener = socket.socket(family)
    # Without this, the port would stay taken after a failure, also for the next try.
    with on_failure(listener.close):
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen(backlog)
    return listener


def address_of(listener: socket.socket) -> Address:
    """Return where a socket listens."""
    name = listener.getsockname()
    return name.hex() if listener.family == socket.AF_UNIX else (name[0], name[1])


def _dial(address: Address, timeout_s: float) -> socket.socket:
    if isinstance(address, str):
        connection = socket.socket(socket.AF_UNIX)
        with on_failure(connection.close):
            connection.settimeout(timeout_s)
            connection.connect(bytes.fromhex(address))
        return connection
    return socket.create_connection(address, timeout_s)


def call(address: Address, secret: bytes, purpose: str, own: int, other: int, timeout_s: float) -> Connection:
    """Return a connection to a rank that listens at an address.

    Args:
        address: the address of the rank.
        secret: the secret of the run.
        purpose: see `Switchboard.connect`.
        own: number of this rank.
        other: number of the rank that should answer.
        timeout_s: seconds without progress after which a call of the connection fails.

    Raises:
        OSError: if the rank does not answer.
        RankError: if the process that answers does not know the secret.
    """
    within_s = min(timeout_s, _HANDSHAKE_S)
    connection = _dial(address, within_s)
    with on_failure(connection.close):
        try:
            keys = introduce(connection, secret, purpose, own, other, within_s)
        except StrangerError as error:
            raise _refusal(str(error), address) from error
    return Connection(connection, keys, other, timeout_s)


@final
class Switchboard:
    """Opens connections of one rank to other ranks, and accepts their connections.

    Args:
        rank: number of this rank.
        secret: the secret of the run.
        listener: the socket to which other ranks connect. The switchboard closes it.
    """

    def __init__(self, rank: int, secret: bytes, listener: socket.socket) -> None:
        self.rank = rank
        self.address = address_of(listener)
        self._secret = secret
        self._listener = listener
        self._addresses: Sequence[Address] = ()
        self._changed = threading.Condition()
        self._arrived: dict[tuple[bytes, int], tuple[socket.socket, Keys]] = {}
        self._strangers = threading.Semaphore(_MAX_STRANGERS)
        self._refused: str | None = None
        self._num_purposes = 0
        self._is_closed = False
        threading.Thread(target=self._listen, name="connections", daemon=True).start()

    def learn(self, addresses: Sequence[Address]) -> None:
        """Store the address at which each rank listens."""
        self._addresses = addresses

    def next_purpose(self) -> str:
        """Return a new name for a group of connections. The n-th call returns the same name on all ranks."""
        self._num_purposes += 1
        return f"group {self._num_purposes}"

    def connect(self, purpose: str, other: int, timeout_s: float) -> Connection:
        """Return the connection to another rank for a purpose. That rank must call this too.

        The rank with the higher number opens the connection.

        Args:
            purpose: a name that both ranks use.
            other: number of the other rank.
            timeout_s: seconds to wait for it.

        Raises:
            OSError: if the rank does not connect in time, or cannot be reached.
            RankError: if the process that answers does not know the secret.
        """
        end = time.monotonic() + timeout_s
        while other < self.rank:
            try:
                return call(self._addresses[other], self._secret, purpose, self.rank, other, timeout_s)
            except OSError as error:
                # A busy rank answers late, so this rank tries again. A rank that has ended refuses at once.
                if isinstance(error, ConnectionRefusedError) or time.monotonic() > end:
                    raise
            time.sleep(_POLL_S)
        while (connection := self.take(purpose, other, timeout_s)) is None:
            if time.monotonic() > end:
                raise TimeoutError(f"rank {other} does not connect: timed out after {timeout_s:.0f} s")
            self.wait(_POLL_S)
        return connection

    def take(self, purpose: str, other: int, timeout_s: float) -> Connection | None:
        """Return the connection that a rank has made for a purpose; `None` if it has not connected yet.

        Args:
            purpose: see `connect`.
            other: number of the rank.
            timeout_s: seconds without progress after which a call of the connection fails.
        """
        with self._changed:
            found = self._arrived.pop((purpose_digest(purpose), other), None)
        return None if found is None else Connection(*found, other, timeout_s)

    def missing(self, purpose: str, others: Iterable[int]) -> list[int]:
        """Return the ranks that have not yet connected for a purpose."""
        with self._changed:
            return [other for other in others if (purpose_digest(purpose), other) not in self._arrived]

    def wait(self, seconds: float) -> None:
        """Block until a rank connects, for at most `seconds`."""
        with self._changed:
            self._changed.wait(seconds)

    @property
    def last_refused(self) -> str | None:
        """Why the last refused connection was refused; `None` if all connections were accepted."""
        return self._refused

    def close(self) -> None:
        """Stop listening, and close the connections that were not taken."""
        with contextlib.suppress(OSError):  # some systems refuse `shutdown` for a listening socket
            # `shutdown` wakes the thread that accepts connections; `close` would not.
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._changed:
            # The lock is held, so a handshake that ends later sees this and closes its own connection.
            self._is_closed = True
            for connection, _ in self._arrived.values():
                connection.close()
            self._arrived.clear()

    def _listen(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except ConnectionError:
                continue
            except OSError as error:
                if self._listener.fileno() < 0 or error.errno in _CLOSED:
                    return
                time.sleep(_POLL_S)  # for example, this process has too many open files at the moment
                continue
            # These connections get neither a reply nor a thread, so a flood of strangers costs little.
            if not _is_same_user(connection) or not self._strangers.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._admit, args=(connection,), daemon=True).start()

    def _admit(self, connection: socket.socket) -> None:
        try:
            keys, other, purpose = examine(connection, self._secret, self.rank, _HANDSHAKE_S)
        except (StrangerError, OSError) as error:
            self._refused = f"a connection from {_name(connection)} was refused: {error}"
            connection.close()
            return
        finally:
            # The handshake has ended, whatever its outcome.
            self._strangers.release()
        with self._changed:
            # The newest connection replaces an older one, which the rank has given up.
            before = self._arrived.pop((purpose, other), None)
            if self._is_closed:
                # The switchboard was closed during the handshake, so this connection must be closed here.
                connection.close()
            else:
                self._arrived[purpose, other] = connection, keys
            self._changed.notify_all()
        if before is not None:  # the rank has connected again
            before[0].close()


def _refusal(what: str, address: Address) -> RankError:
    """Return the error for an answer from a process that does not know the secret."""
    return RankError(
        what,
        where=address if isinstance(address, str) else f"{address[0]}:{address[1]}",
        remedy="start all ranks with the same secret: HEADWATER_SECRET, or the file HEADWATER_SECRET_FILE, "
        "or ~/.config/headwater/ranks.secret on every host (docs/security.md)",
    )


_CLOSED = {errno.EBADF, errno.EINVAL}


def _is_same_user(connection: socket.socket) -> bool:
    """False for a process of another user of this host. The user of a network connection is unknown."""
    if connection.family != socket.AF_UNIX:
        return True
    _, uid, _ = struct.unpack("iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(uid == os.geteuid())


def _name(connection: socket.socket) -> str:
    try:
        name = connection.getpeername()
    except OSError:
        return "a process that has disconnected"
    return f"{name[0]}:{name[1]}" if isinstance(name, tuple) else "a process of this host"
