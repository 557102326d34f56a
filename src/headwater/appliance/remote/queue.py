"""The queue of an appliance, as a client sees it."""

from __future__ import annotations

from typing import Any

from headwater.appliance.remote.connection import Connection
from headwater.appliance.request_queue import RequestQueue
from headwater.appliance.types import Job


class RemoteQueue(RequestQueue):
    """The queue that commands on the appliance use. Paths of its jobs are paths of that machine.

    Args:
        connection: the connection to the appliance.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def ask(self, request: str, **arguments: object) -> Any:
        # A cancellation is not sent a second time, because a second one kills the job at once.
        once = request == "cancel"
        fields = {"ask": request, **arguments}
        return self._connection.ask("queue", once=once, request=fields).header["answer"]

    def read_log(self, job: Job, position: int) -> bytes:
        return self._connection.ask("watch", name=job.name, position=position, phase=None, wait_s=0).body
