"""The client of a shared embedded queue. Every request goes over the socket of its supervisor."""

from __future__ import annotations

import json
import socket
import time
from contextlib import suppress
from typing import Any

from headwater.appliance.folder import QueueFolder
from headwater.appliance.queue import read_local_log
from headwater.appliance.request_queue import RequestQueue, answer_of
from headwater.appliance.server import socket_address
from headwater.appliance.types import Job
from headwater.core.errors import QueueError

_TIMEOUT_S = 60.0
_RETRY_S, _RETRY_FOR_S = 0.1, 5.0


class SharedQueue(RequestQueue):
    """A queue that belongs to root and is shared by all users.

    Args:
        folder: the queue's folder.
    """

    def __init__(self, folder: QueueFolder) -> None:
        self._folder = folder

    def read_log(self, job: Job, position: int) -> bytes:
        return read_local_log(job, position)

    def ask(self, request: str, **arguments: object) -> Any:
        # If no supervisor answers, the request is sent again for a few seconds. This is safe: a submission
        # has a token, and most other requests may be repeated. `cancel` is not repeated after it was sent,
        # because a second cancellation kills the job at once.
        line = json.dumps({"ask": request, **arguments}).encode() + b"\n"
        end = time.monotonic() + _RETRY_FOR_S
        reply: Any = None
        while True:
            try:
                reply = json.loads(self._exchange(line))
                # With `again`, the server was busy and has not read the request.
                if not reply.get("again"):
                    break
            except (ConnectionRefusedError, FileNotFoundError):
                pass
            except (OSError, ValueError) as error:
                # Not repeated: a second cancellation would kill the job at once.
                if request == "cancel":
                    raise QueueError(
                        "the connection broke: the job may or may not have been cancelled",
                        remedy="see `headwater jobs list`, then cancel it again if necessary",
                    ) from error
            if time.monotonic() > end and reply is not None:
                break
            if time.monotonic() > end:
                raise QueueError(
                    "the supervisor of the queue does not answer",
                    where=str(self._folder.path),
                    remedy="as root, run: headwater jobs serve --all_users; or use your own --queue_dir",
                )
            time.sleep(_RETRY_S)
        return answer_of(reply)

    def _exchange(self, line: bytes) -> bytes:
        with socket.socket(socket.AF_UNIX) as connection, socket_address(self._folder) as address:
            connection.settimeout(_TIMEOUT_S)
            try:
                connection.connect(address)
            except BlockingIOError as error:  # the backlog is full; nothing was sent, so a retry is safe
                raise ConnectionRefusedError(*error.args) from error
            with suppress(ConnectionError):  # a busy server refuses a connection before it reads
                connection.sendall(line)
            with connection.makefile("rb") as file:
                return file.readline()
