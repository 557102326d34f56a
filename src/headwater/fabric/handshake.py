"""Mutual authentication of two ranks on a new connection, by a shared secret.

The connecting rank sends its number, the number of the rank that it wants, and a random nonce. The listening
rank answers with its own nonce and an HMAC over both messages, keyed by the secret. The connecting rank then
sends another HMAC. So neither rank sends data to a stranger, no message can be replayed, and the secret never
crosses the connection. A stranger can send at most 112 bytes, which are compared and never interpreted.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import secrets
import socket
import struct
import time

_MAGIC = b"HWRANK1\n"
_HELLO = struct.Struct("<8s32sII32s")
_NONCE_BYTES = _CODE_BYTES = 32
_ACCEPTED = b"\x01"


class StrangerError(Exception):
    """The process at the other end does not know the secret, or is not the expected rank."""


@dataclasses.dataclass(frozen=True)
class Keys:
    """The secret keys that authenticate the messages of one connection.

    Attributes:
        sending: authenticates what this end sends.
        receiving: authenticates what this end receives.
    """

    sending: bytes
    receiving: bytes


def introduce(
    connection: socket.socket, secret: bytes, purpose: str, own: int, other: int, within_s: float
) -> Keys:
    """Authenticate a connection that this rank opened.

    Args:
        connection: the connection to the other end.
        secret: the secret of the run.
        purpose: name of the connection; see `Switchboard.connect`.
        own: number of this rank.
        other: number of the rank that should answer.
        within_s: seconds that the handshake may take.

    Returns:
        The keys of the connection.

    Raises:
        StrangerError: if the other end does not know the secret.
        OSError: if the other end does not answer in time.
    """
    end = time.monotonic() + within_s
    hello = _HELLO.pack(_MAGIC, secrets.token_bytes(_NONCE_BYTES), own, other, purpose_digest(purpose))
    _send(connection, hello, end)
    answer = _receive(connection, _NONCE_BYTES + _CODE_BYTES, end)
    said = hello + answer[:_NONCE_BYTES]
    # The comparison takes constant time. The time of a plain one would tell how many bytes are right.
    if not hmac.compare_digest(_code(secret, b"accepts", said), answer[_NONCE_BYTES:]):
        raise StrangerError(f"the process that answers for rank {other} does not know the secret")
    _send(connection, _code(secret, b"connects", said), end)
    if _receive(connection, 1, end) != _ACCEPTED:
        raise StrangerError(
            f"the process that answers for rank {other} refused this rank: it has another number or secret"
        )
    return Keys(_code(secret, b"out", said), _code(secret, b"in", said))


def examine(connection: socket.socket, secret: bytes, own: int, within_s: float) -> tuple[Keys, int, bytes]:
    """Authenticate a connection that another process opened.

    Args:
        connection: the connection to the other process.
        secret: the secret of the run.
        own: number of this rank.
        within_s: seconds that the handshake may take.

    Returns:
        The keys, the number of the other rank, and the digest of the purpose; see `purpose_digest`.

    Raises:
        StrangerError: if the other process does not know the secret, or expects another rank here.
        OSError: if it does not answer in time.
    """
    end = time.monotonic() + within_s
    hello = _receive(connection, _HELLO.size, end)
    magic, _, other, wanted, purpose = _HELLO.unpack(hello)
    if magic != _MAGIC:
        raise StrangerError("its first message is not that of a Headwater rank")
    said = hello + secrets.token_bytes(_NONCE_BYTES)
    _send(connection, said[_HELLO.size :] + _code(secret, b"accepts", said), end)
    if not hmac.compare_digest(_code(secret, b"connects", said), _receive(connection, _CODE_BYTES, end)):
        raise StrangerError("the process there does not know the secret of this rank")
    # This comes after the authentication, so that a stranger does not learn rank numbers.
    if wanted != own:
        raise StrangerError(f"rank {other} expected rank {wanted} here, but this is rank {own}")
    _send(connection, _ACCEPTED, end)
    return Keys(_code(secret, b"in", said), _code(secret, b"out", said)), other, purpose


def purpose_digest(purpose: str) -> bytes:
    """Return the digest of a purpose that the first message of a handshake contains."""
    return hashlib.sha256(purpose.encode()).digest()


def _code(secret: bytes, role: bytes, said: bytes) -> bytes:
    return hmac.digest(secret, role + b"\0" + said, "sha256")


def _send(connection: socket.socket, data: bytes, end: float) -> None:
    connection.settimeout(_left(end))
    connection.sendall(data)


def _receive(connection: socket.socket, count: int, end: float) -> bytes:
    data = b""
    while len(data) < count:
        connection.settimeout(_left(end))
        new = connection.recv(count - len(data))
        if not new:
            raise ConnectionError("the other end has closed the connection")
        data += new
    return data


def _left(end: float) -> float:
    # The whole handshake has one deadline. A timeout for each byte would let a stranger prolong it.
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError("the other end did not complete the handshake in time")
    return left
