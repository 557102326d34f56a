"""Requests of other users to a shared queue: a line of JSON, checked field by field, and its answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from headwater.appliance.database import Database
from headwater.appliance.embedded import Caller, EmbeddedQueue
from headwater.appliance.folder import QueueFolder
from headwater.appliance.queue import Queue
from headwater.appliance.types import Job, Submission, read_fields, read_label_changes, read_priority
from headwater.core.errors import ConfigError, HeadwaterError, QueueError

MAX_BYTES = 8 << 20
"""Longest request."""

_MAX_ERROR_CHARS = 2000
"""An error may repeat what was asked; the answer repeats no more than this."""

_Told = Mapping[str, Any]


def _label(queue: Queue, told: _Told) -> Job:
    labels: dict[str, str | None] = told["labels"]
    if not all(value is None or isinstance(value, str) for value in labels.values()):
        raise ConfigError("expected texts or null as labels", where="the request: labels")
    read_label_changes([f"{name}-" if value is None else f"{name}={value}" for name, value in labels.items()])
    return queue.label(told["name"], labels)


_TEXT, _FLAG = (str,), (bool,)
_ANSWERS: dict[str, tuple[dict[str, tuple[type, ...]], Callable[[Queue, _Told], object]]] = {
    "submit": (
        {"submission": (dict,), "token": _TEXT},
        lambda queue, told: queue.submit(Submission.from_record(told["submission"]), told["token"]),
    ),
    "jobs": ({"everything": _FLAG}, lambda queue, told: queue.jobs(everything=told["everything"])),
    "show": ({"name": _TEXT}, lambda queue, told: queue.show(told["name"])),
    "cancel": ({"name": _TEXT}, lambda queue, told: queue.cancel(told["name"])),
    "label": ({"name": _TEXT, "labels": (dict,)}, _label),
    "set_priority": (
        {"name": _TEXT, "priority": _TEXT},
        lambda queue, told: queue.set_priority(told["name"], read_priority(told["priority"])),
    ),
    "num_csx": ({}, lambda queue, told: queue.num_csx()),
}
"""The fields of each request with their types, and how it is answered."""


def answer(folder: QueueFolder, caller: Caller, line: bytes) -> dict[str, Any]:
    """Return the answer to a request, or the error, as JSON has it.

    Args:
        folder: of the queue.
        caller: name of the user that sent the request, as the kernel reports it.
        line: the request; anything at all.
    """
    try:
        request = _parse(line)
        fields, ask = _ANSWERS[request.pop("ask")]
        told: _Told = read_fields(request, fields, "the request")
        database = Database(folder)
        try:
            return {"answer": _plain(ask(EmbeddedQueue(database, caller, wake=lambda: None), told))}
        finally:
            database.close()
    except HeadwaterError as error:
        texts = {"what": error.what, "where": error.where, "remedy": error.remedy}
        short = {name: text and text[:_MAX_ERROR_CHARS] for name, text in texts.items()}
        return {"error": {"kind": type(error).__name__, **short}}


def _parse(line: bytes) -> dict[str, Any]:
    if len(line) > MAX_BYTES:
        raise ConfigError(f"command and environment of a job have more than {MAX_BYTES >> 20} MiB")
    try:
        request = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        raise QueueError(f"expected a request in JSON, got {line[:40]!r}: {error}") from error
    if not isinstance(request, dict):
        raise QueueError(f"expected a request in JSON, got a {type(request).__name__}")
    if not isinstance(request.get("ask"), str) or request["ask"] not in _ANSWERS:
        raise QueueError(
            f"expected one of {', '.join(_ANSWERS)}, got {request.get('ask')!r}", where="the request: ask"
        )
    return request


def _plain(found: object) -> object:
    if isinstance(found, Job):
        return found.to_record()
    return [_plain(item) for item in found] if isinstance(found, list) else found
