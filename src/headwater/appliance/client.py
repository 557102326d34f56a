"""The embedded queue of somebody else: every question goes over his socket."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from typing import Any

from headwater.appliance.folder import QueueFolder
from headwater.appliance.queue import Queue
from headwater.appliance.server import socket_address
from headwater.appliance.types import Job, Priority, Submission
from headwater.core import errors
from headwater.core.errors import HeadwaterError, QueueError

_TIMEOUT_S = 60.0
_RETRY_S, _RETRY_FOR_S = 0.1, 5.0


class SharedQueue(Queue):
    """A queue that root keeps for all users.

    Args:
        folder: of the queue.
    """

    def __init__(self, folder: QueueFolder) -> None:
        self._folder = folder

    def submit(self, submission: Submission, token: str) -> Job:
        return Job.from_record(self._ask("submit", submission=submission.to_record(), token=token))

    def jobs(self, *, everything: bool = False) -> list[Job]:
        return [Job.from_record(record) for record in self._ask("jobs", everything=everything)]

    def show(self, name: str) -> Job:
        return Job.from_record(self._ask("show", name=name))

    def cancel(self, name: str) -> Job:
        return Job.from_record(self._ask("cancel", name=name))

    def label(self, name: str, labels: Mapping[str, str | None]) -> Job:
        return Job.from_record(self._ask("label", name=name, labels=dict(labels)))

    def set_priority(self, name: str, priority: Priority) -> Job:
        return Job.from_record(self._ask("set_priority", name=name, priority=priority))

    def num_csx(self) -> int:
        return int(self._ask("num_csx"))

    def _ask(self, question: str, **told: object) -> Any:
        """The answer; a supervisor that was just restarted is given time to come back.

        Asking again is safe: a submission has its token, and everything else may be done twice. Cancelling is
        sent once: twice means something else.
        """
        line = json.dumps({"ask": question, **told}).encode() + b"\n"
        end = time.monotonic() + _RETRY_FOR_S
        while True:
            try:
                reply = json.loads(self._exchange(line))
                break
            except (ConnectionRefusedError, FileNotFoundError):
                pass
            except (OSError, ValueError) as error:
                if question == "cancel":
                    raise QueueError("it is not known whether the job was cancelled; look") from error
            if time.monotonic() > end:
                raise QueueError(
                    "the supervisor of the queue does not answer",
                    where=str(self._folder.path),
                    remedy="root starts it: headwater jobs serve --all_users; or use a queue of your own",
                )
            time.sleep(_RETRY_S)
        if "error" in reply:
            raise _error(reply["error"])
        return reply["answer"]

    def _exchange(self, line: bytes) -> bytes:
        with socket.socket(socket.AF_UNIX) as connection, socket_address(self._folder) as address:
            connection.settimeout(_TIMEOUT_S)
            try:
                connection.connect(address)
            except BlockingIOError as error:  # too many are connecting: nothing was asked yet
                raise ConnectionRefusedError(*error.args) from error
            connection.sendall(line)
            with connection.makefile("rb") as file:
                return file.readline()


def _error(told: Mapping[str, Any]) -> HeadwaterError:
    kind: type[HeadwaterError] = getattr(errors, told["kind"])
    return kind(told["what"], where=told["where"], remedy=told["remedy"])
