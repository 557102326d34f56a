"""The server of a shared queue. A request and its answer are each a line of JSON over a Unix socket.

The user of a request is the one that the kernel reports for the peer process, never one named in the request.
"""

from __future__ import annotations

import json
import os
import socket
import socketserver
import struct
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from headwater.appliance.database import Database
from headwater.appliance.embedded import Caller, EmbeddedQueue
from headwater.appliance.folder import QueueFolder
from headwater.appliance.queue import Queue
from headwater.appliance.requests import MAX_BYTES, answer, busy

_TIMEOUT_S = 10.0
_CREDENTIALS = struct.Struct("3i")


@contextmanager
def serving(folder: QueueFolder, places: ConnectionLimits | None = None) -> Iterator[None]:
    """Answer requests of other users while the context is active. Does nothing if the queue is not shared.

    Args:
        folder: the folder of the queue.
        places: limits the connections; the usual limits if not given.
    """
    if not folder.shared:
        yield
        return
    with suppress(FileNotFoundError):
        folder.socket.unlink()  # left by a supervisor that was killed
    with _Server(folder, places or ConnectionLimits()) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def socket_address(folder: QueueFolder) -> Iterator[str]:
    """Yield a short address of the queue's socket, because Unix socket addresses have at most 108 bytes."""
    handle = os.open(folder.path, os.O_PATH)
    try:
        yield f"/proc/self/fd/{handle}/{folder.socket.name}"
    finally:
        os.close(handle)


class ConnectionLimits:
    """Limits how many connections are answered at a time, in all and for each user.

    Args:
        most: places for all users together.
        per_user: places for one user, so that idle connections of one user leave places for the others.
    """

    def __init__(self, most: int = 256, per_user: int = 64) -> None:
        self._most, self._per_user = most, per_user
        self._taken: Counter[int] = Counter()
        self._lock = threading.Lock()

    def take(self, uid: int) -> str | None:
        """Take a place for a user and return `None`, or return the reason if all places are taken."""
        with self._lock:
            if self._taken[uid] >= self._per_user:
                return f"uid {uid} has {self._per_user} connections to the queue, the most for one user"
            if self._taken.total() >= self._most:
                return f"the queue has {self._most} connections, the most for all users"
            self._taken[uid] += 1
            return None

    def leave(self, uid: int) -> None:
        """Release a place of a user."""
        with self._lock:
            self._taken[uid] -= 1
            self._taken += Counter()  # drops users without connections


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, folder: QueueFolder, places: ConnectionLimits) -> None:
        self.folder = folder
        self._places = places
        with socket_address(folder) as address:
            super().__init__(address, _Handler)
        # All users may connect; the folder allows entry, not listing.
        folder.socket.chmod(0o666)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread, or refuse at once if too many connections are open."""
        # The kernel reports the user, because nothing in a request is trusted.
        uid = caller_of(request).uid
        why = self._places.take(uid)
        if why is None:
            try:
                super().process_request(request, client_address)
            except RuntimeError:  # the system has no thread for it
                self._places.leave(uid)
                raise
            return
        with suppress(OSError):
            request.setblocking(False)  # the refusal fits into the buffer of a new socket
            request.sendall(_line(busy(why, where=str(self.folder.path))))
        self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer the request, then release its place."""
        uid = caller_of(request).uid
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.leave(uid)


class _Handler(socketserver.StreamRequestHandler):
    timeout = _TIMEOUT_S
    server: _Server

    def handle(self) -> None:
        with suppress(OSError):  # the client is gone, or too slow
            line = self.rfile.readline(MAX_BYTES + 1)
            self.wfile.write(_line(answer(self._queue, line)))

    @contextmanager
    def _queue(self) -> Iterator[Queue]:
        # Each request opens the database, because a connection to it belongs to one thread.
        database = Database(self.server.folder)
        try:
            # The kernel reports the user, because nothing in a request is trusted.
            yield EmbeddedQueue(database, caller_of(self.request), wake=lambda: None)
        finally:
            database.close()


def caller_of(connection: socket.socket) -> Caller:
    """Return the user at the other end, as the kernel reports it."""
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, gid = _CREDENTIALS.unpack(peer)
    return Caller(uid, gid)


def _line(found: object) -> bytes:
    return json.dumps(found).encode() + b"\n"
