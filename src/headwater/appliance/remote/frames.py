"""The frames that client and server exchange: a header in JSON, and a body of bytes. Pure functions of bytes.

A frame is the length of the header (4 bytes) and of the body (4 bytes), both big-endian, then both of them.
The stream of the server begins with `MARK`. Bytes before it were printed by a login script, and are skipped.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Iterator, Mapping
from typing import Any

from headwater.appliance.types import SAME_VERSION
from headwater.core.errors import QueueError

PROTOCOL = 2
"""Number of the protocol. Client and server with different numbers do not understand each other."""
MARK = b"\0headwater appliance\n"
MAX_HEADER, MAX_BODY = 16 << 20, 8 << 20
"""Longest header and body, in bytes."""
_MAX_NOISE = 1 << 20
_LENGTHS = struct.Struct("!II")


@dataclasses.dataclass(frozen=True)
class Frame:
    """A request or a reply.

    Attributes:
        header: values that JSON can represent.
        body: content of a file or log.
    """

    header: Mapping[str, Any]
    body: bytes = b""


def encode(frame: Frame) -> bytes:
    """Return the bytes of a frame.

    Raises:
        QueueError: if it is too long.
    """
    header = json.dumps(frame.header).encode()
    if len(header) > MAX_HEADER or len(frame.body) > MAX_BODY:
        raise _too_long(len(header), len(frame.body))
    return _LENGTHS.pack(len(header), len(frame.body)) + header + frame.body


class Decoder:
    """Divides a stream of bytes into frames.

    Args:
        skip_to_mark: true for the stream of a server, which begins with `MARK`.
    """

    def __init__(self, *, skip_to_mark: bool = False) -> None:
        self._held = bytearray()
        self._skips = skip_to_mark

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Take the next bytes of the stream, and yield the frames that are complete now.

        Raises:
            QueueError: if the stream is not one of frames.
        """
        self._held += data
        if self._skips and not self._find_mark():
            return
        while len(self._held) >= _LENGTHS.size:
            header, body = _LENGTHS.unpack_from(self._held)
            if header > MAX_HEADER or body > MAX_BODY:
                raise _too_long(header, body)
            end = _LENGTHS.size + header + body
            if len(self._held) < end:
                return
            text = bytes(self._held[_LENGTHS.size : _LENGTHS.size + header])
            frame = Frame(_parse(text), bytes(self._held[_LENGTHS.size + header : end]))
            del self._held[:end]
            yield frame

    def _find_mark(self) -> bool:
        place = self._held.find(MARK)
        if place < 0:
            if len(self._held) > _MAX_NOISE:
                raise QueueError(
                    f"expected an answer of headwater jobs stdio, got {bytes(self._held[:80])!r}",
                    remedy="change the login script of that machine, so that it prints less",
                )
            return False
        del self._held[: place + len(MARK)]
        self._skips = False
        return True


def _parse(text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise QueueError(
            f"expected a header in JSON, got {text[:40]!r}: {error}", remedy=SAME_VERSION
        ) from error
    if not isinstance(header, dict):
        raise QueueError(
            f"expected a header that is an object in JSON, got a {type(header).__name__}", remedy=SAME_VERSION
        )
    return header


def _too_long(header: int, body: int) -> QueueError:
    return QueueError(
        f"expected a frame with a header of at most {MAX_HEADER} bytes and a body of at most {MAX_BODY}, "
        f"got {header} and {body}",
        remedy="send less in one request, or install the same version of headwater on both machines",
    )
