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
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from headwater.appliance.embedded import Caller
from headwater.appliance.folder import QueueFolder
from headwater.appliance.requests import MAX_BYTES, answer

_TIMEOUT_S = 10.0
_CREDENTIALS = struct.Struct("3i")


@contextmanager
def serving(folder: QueueFolder) -> Iterator[None]:
    """Answer the requests of other users inside the context, if the queue is shared."""
    if not folder.shared:
        yield
        return
    with suppress(FileNotFoundError):
        folder.socket.unlink()  # left by a supervisor that was killed
    with _Server(folder) as server:
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


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, folder: QueueFolder) -> None:
        self.folder = folder
        with socket_address(folder) as address:
            super().__init__(address, _Handler)
        folder.socket.chmod(0o666)


class _Handler(socketserver.StreamRequestHandler):
    timeout = _TIMEOUT_S
    server: _Server

    def handle(self) -> None:
        with suppress(OSError):  # the client is gone, or too slow
            line = self.rfile.readline(MAX_BYTES + 1)
            found = answer(self.server.folder, self._caller(), line)
            self.wfile.write(json.dumps(found).encode() + b"\n")

    def _caller(self) -> Caller:
        peer = self.request.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, uid, gid = _CREDENTIALS.unpack(peer)
        return Caller(uid, gid)
