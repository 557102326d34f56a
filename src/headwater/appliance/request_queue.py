"""Queues in another process, to which each call is sent as a request."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from headwater.appliance.queue import Queue
from headwater.appliance.types import Job, Priority, Submission
from headwater.core.errors import QueueError, error_class


class RequestQueue(Queue):
    """A queue that sends requests, which `headwater.appliance.requests.answer` answers in another process."""

    @abstractmethod
    def ask(self, request: str, **arguments: object) -> Any:
        """Send a request and return its answer.

        Args:
            request: kind of the request.
            arguments: its fields, as values that JSON can represent.

        Raises:
            HeadwaterError: the error with which the queue answers, or that of a connection that breaks.
        """

    def submit(self, submission: Submission, token: str) -> Job:
        return Job.from_record(self.ask("submit", submission=submission.to_record(), token=token))

    def jobs(self, *, everything: bool = False) -> list[Job]:
        return [Job.from_record(record) for record in self.ask("jobs", everything=everything)]

    def show(self, name: str) -> Job:
        return Job.from_record(self.ask("show", name=name))

    def cancel(self, name: str) -> Job:
        return Job.from_record(self.ask("cancel", name=name))

    def label(self, name: str, labels: Mapping[str, str | None]) -> Job:
        return Job.from_record(self.ask("label", name=name, labels=dict(labels)))

    def set_priority(self, name: str, priority: Priority) -> Job:
        return Job.from_record(self.ask("set_priority", name=name, priority=priority))

    def num_csx(self) -> int:
        return int(self.ask("num_csx"))


def answer_of(reply: Mapping[str, Any]) -> Any:
    """Return the answer in a reply, or raise the error in it.

    Raises:
        HeadwaterError: the error of the queue.
    """
    if "error" not in reply:
        return reply["answer"]
    record = reply["error"]
    kind = error_class(record["kind"]) or QueueError
    raise kind(record["what"], where=record["where"], remedy=record["remedy"])
