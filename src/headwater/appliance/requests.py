"""Requests to a queue from other processes. A request is a line of JSON that is checked field by field."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from headwater.appliance.queue import Queue
from headwater.appliance.types import (
    SAME_VERSION,
    Job,
    Submission,
    read_fields,
    read_label_changes,
    read_priority,
)
from headwater.core.errors import ConfigError, HeadwaterError, QueueError

MAX_BYTES = 8 << 20
"""Longest request, in bytes."""

_MAX_ERROR_CHARS = 2000
"""Longest text of an error in an answer. Errors may quote the request, which can be large."""

_Arguments = Mapping[str, Any]


def _label(queue: Queue, arguments: _Arguments) -> Job:
    labels: dict[str, str | None] = arguments["labels"]
    if not all(value is None or isinstance(value, str) for value in labels.values()):
        raise ConfigError(
            "expected strings or null as labels", where="the request: labels", remedy=SAME_VERSION
        )
    # The rules of the command line are checked here too, because a client can send anything.
    read_label_changes([f"{name}-" if value is None else f"{name}={value}" for name, value in labels.items()])
    return queue.label(arguments["name"], labels)


_TEXT, _FLAG = (str,), (bool,)
_ANSWERS: dict[str, tuple[dict[str, tuple[type, ...]], Callable[[Queue, _Arguments], object]]] = {
    "submit": (
        {"submission": (dict,), "token": _TEXT},
        lambda queue, args: queue.submit(Submission.from_record(args["submission"]), args["token"]),
    ),
    "jobs": ({"everything": _FLAG}, lambda queue, args: queue.jobs(everything=args["everything"])),
    "show": ({"name": _TEXT}, lambda queue, args: queue.show(args["name"])),
    "cancel": ({"name": _TEXT}, lambda queue, args: queue.cancel(args["name"])),
    "label": ({"name": _TEXT, "labels": (dict,)}, _label),
    "set_priority": (
        {"name": _TEXT, "priority": _TEXT},
        lambda queue, args: queue.set_priority(args["name"], read_priority(args["priority"])),
    ),
    "num_csx": ({}, lambda queue, args: queue.num_csx()),
}
"""Kind of request -> its fields with their types, and the function that answers it."""


def answer(opened: Callable[[], AbstractContextManager[Queue]], line: bytes) -> dict[str, Any]:
    """Return the answer to a request, or its error, as values that JSON can represent.

    Args:
        opened: opens the queue, as the user that sent the request sees it. It is called for valid requests.
        line: the request, from an untrusted sender.
    """
    try:
        # This is inside `try`, because a bad request gets an answer and must not end the server's thread.
        request = _parse(line)
        fields, ask = _ANSWERS[request.pop("ask")]
        arguments: _Arguments = read_fields(request, fields, "the request")
        with opened() as queue:
            return {"answer": _plain(ask(queue, arguments))}
    except HeadwaterError as error:
        return refusal(error)


def busy(why: str, *, where: str) -> dict[str, Any]:
    """Return the answer to a connection beyond the limit: an error, after which the client may ask again."""
    remedy = "close connections that are idle (the queue does so after 10 s), and ask again"
    return {**refusal(QueueError(why, where=where, remedy=remedy)), "again": True}


def refusal(error: HeadwaterError) -> dict[str, Any]:
    """Return the answer that reports an error."""
    texts = {"what": error.what, "where": error.where, "remedy": error.remedy}
    short = {name: text and text[:_MAX_ERROR_CHARS] for name, text in texts.items()}
    return {"error": {"kind": type(error).__name__, **short}}


def _parse(line: bytes) -> dict[str, Any]:
    if len(line) > MAX_BYTES:
        raise ConfigError(
            f"the request is larger than {MAX_BYTES >> 20} MiB",
            remedy="submit a shorter command, with fewer or shorter environment variables",
        )
    try:
        request = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        raise QueueError(
            f"expected a request in JSON, got {line[:40]!r}: {error}", remedy=SAME_VERSION
        ) from error
    if not isinstance(request, dict):
        raise QueueError(
            f"expected a request as a JSON object, got a {type(request).__name__}", remedy=SAME_VERSION
        )
    if not isinstance(request.get("ask"), str) or request["ask"] not in _ANSWERS:
        raise QueueError(
            f"expected one of {', '.join(_ANSWERS)}, got {request.get('ask')!r}",
            where="the request: ask",
            remedy=SAME_VERSION,
        )
    return request


def _plain(found: object) -> object:
    if isinstance(found, Job):
        return found.to_record()
    return [_plain(item) for item in found] if isinstance(found, list) else found
