"""How other users ask the owner of a shared queue: a line of JSON over a socket, and a line back.

Who asks is not what a request says but what the kernel says of the process at the other end.
"""

from __future__ import annotations

import json
import os
import socket
import socketserver
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from headwater.appliance.database import Database
from headwater.appliance.embedded import Caller, EmbeddedQueue
from headwater.appliance.folder import QueueFolder
from headwater.appliance.queue import Queue
from headwater.appliance.types import Job, Priority, Submission
from headwater.core.errors import ConfigError, HeadwaterError

MAX_BYTES = 8 << 20
_TIMEOUT_S = 10.0
_CREDENTIALS = struct.Struct("3i")

_ANSWERS: dict[str, Callable[[Queue, dict[str, Any]], object]] = {
    "submit": lambda queue, told: queue.submit(Submission.from_record(told["submission"]), told["token"]),
    "jobs": lambda queue, told: queue.jobs(everything=told["everything"]),
    "show": lambda queue, told: queue.show(told["name"]),
    "cancel": lambda queue, told: queue.cancel(told["name"]),
    "label": lambda queue, told: queue.label(told["name"], told["labels"]),
    "set_priority": lambda queue, told: queue.set_priority(told["name"], Priority(told["priority"])),
    "num_csx": lambda queue, told: queue.num_csx(),
}


@contextmanager
def serving(folder: QueueFolder) -> Iterator[None]:
    """Answers other users meanwhile, where the queue is shared."""
    if not folder.shared:
        yield
        return
    with suppress(FileNotFoundError):
        folder.socket.unlink()  # of a supervisor that was killed
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
    """The address of the queue's socket, short enough for the system however long the path is."""
    handle = os.open(folder.path, os.O_PATH)
    try:
        yield f"/proc/self/fd/{handle}/{folder.socket.name}"
    finally:
        os.close(handle)


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True

    def __init__(self, folder: QueueFolder) -> None:
        self.folder = folder
        with socket_address(folder) as address:
            super().__init__(address, _Handler)
        folder.socket.chmod(0o666)


class _Handler(socketserver.StreamRequestHandler):
    timeout = _TIMEOUT_S
    server: _Server

    def handle(self) -> None:
        with suppress(OSError):  # whoever asked is gone, or too slow
            line = self.rfile.readline(MAX_BYTES + 1)
            self.wfile.write(json.dumps(self._answer(line)).encode() + b"\n")

    def _answer(self, line: bytes) -> dict[str, Any]:
        size = _CREDENTIALS.size
        peer = self.request.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        _, uid, gid = _CREDENTIALS.unpack(peer)
        try:
            if len(line) > MAX_BYTES:
                raise ConfigError(f"command and environment of a job have more than {MAX_BYTES >> 20} MiB")
            database = Database(self.server.folder)
            try:
                queue = EmbeddedQueue(database, Caller(uid, gid), wake=lambda: None)
                request = json.loads(line)
                return {"answer": _plain(_ANSWERS[request["ask"]](queue, request))}
            finally:
                database.close()
        except HeadwaterError as error:
            told = {"what": error.what, "where": error.where, "remedy": error.remedy}
            return {"error": {"kind": type(error).__name__, **told}}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            told = {"what": f"the request makes no sense: {error!r}", "where": None, "remedy": None}
            return {"error": {"kind": "QueueError", **told}}


def _plain(answer: object) -> object:
    if isinstance(answer, Job):
        return answer.to_record()
    return [_plain(item) for item in answer] if isinstance(answer, list) else answer
