"""Answers to the requests of a file, one in each line. A run that was killed continues where it ended."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from headwater.core.errors import DataError, HeadwaterError, NonFiniteError
from headwater.core.files import replace_file, why_unreadable
from headwater.serving.answer import Answer
from headwater.serving.errors import TOO_MANY, ApiError, of_project
from headwater.serving.service import CARD, Service, parsed

logger = logging.getLogger(__name__)

_AHEAD = 256
"""Lines that may be answered before the answer to an earlier line is written."""
_PAUSE_SECONDS = 0.1
"""Time until a request that the queue of its model refused is tried again."""


def answer_file(service: Service, requests: Path, answers: Path, on_progress: Callable[[int], None]) -> int:
    """Write the answer to each line of a file, in the order of the lines.

    A line is a JSON object as in the Cerebras-GPT model card, or as in OpenAI's batch files (`custom_id`,
    `method`, `url`, `body`). Answers that are in the file already are kept. A file beside the answers records
    a checksum of the requests, and the models.

    Args:
        service: answers the requests.
        requests: JSON lines.
        answers: the file of the answers.
        on_progress: called with the number of answers so far.

    Returns:
        The number of answers in the file that are errors.

    Raises:
        DataError: if a file cannot be read, the answers belong to other requests or models, or another
            process writes them.
    """
    try:
        lines = [line for line in requests.read_bytes().splitlines() if line.strip()]
    except OSError as error:
        raise DataError(
            f"the requests cannot be read: {why_unreadable(error)}",
            where=str(requests),
            remedy="name a file with a JSON request in each line",
        ) from error
    answers.parent.mkdir(parents=True, exist_ok=True)
    with answers.open("a+b") as output:
        _lock(output, answers)
        _check_same(service, requests, answers)
        done, errors = _keep_whole_lines(output)
        if done > len(lines):
            raise DataError(
                f"expected at most {len(lines)} answers, found {done}",
                where=str(answers),
                remedy="name another file for the answers",
            )
        on_progress(done)
        return errors + asyncio.run(_answer_all(service, lines, done, output, on_progress))


def _lock(output: IO[bytes], answers: Path) -> None:
    """Lock the file of the answers until it is closed.

    Raises:
        DataError: if another process has locked it.
    """
    try:
        fcntl.flock(output, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise DataError(
            "another process is writing these answers",
            where=str(answers),
            remedy="wait for its end, or name another file for the answers",
        ) from error


def _check_same(service: Service, requests: Path, answers: Path) -> None:
    """Check that the answers belong to these requests and models, or record that they will."""
    record = answers.with_name(f"{answers.name}.requests")
    models = {name: model.source for name, model in service.models.items()}
    checksum = hashlib.sha256(requests.read_bytes()).hexdigest()
    expected = json.dumps({"requests": checksum, "models": models}, indent=2)
    if answers.stat().st_size:
        found = record.read_text().strip() if record.is_file() else None
        if found != expected:
            raise DataError(
                "the file has answers to other requests, or of other models",
                where=str(answers),
                remedy="name another file for the answers, or move this one away",
            )
        return
    replace_file(record, f"{expected}\n".encode())


def _keep_whole_lines(output: IO[bytes]) -> tuple[int, int]:
    """Cut off a line that a killed run has not finished. Return the numbers of whole lines and errors."""
    output.seek(0)
    end = count = errors = 0
    for line in output:
        if not line.endswith(b"\n"):
            break
        end, count = end + len(line), count + 1
        try:
            answer = json.loads(line)
        except ValueError as error:
            raise DataError(
                f"expected JSON in line {count}, got {line[:50]!r}",
                where=str(output.name),
                remedy="name another file for the answers, or move this one away",
            ) from error
        errors += isinstance(answer, dict) and answer.get("error") is not None
    output.truncate(end)
    output.seek(0, os.SEEK_END)
    return count, errors


async def _answer_all(
    service: Service, lines: list[bytes], done: int, output: IO[bytes], on_progress: Callable[[int], None]
) -> int:
    """Answer the lines after the first `done` ones. Return the number of errors."""
    errors = 0
    running: dict[int, asyncio.Task[tuple[Any, bool]]] = {}
    left: Iterator[tuple[int, bytes]] = iter(enumerate(lines[done:], start=done))
    try:
        for next_line in range(done, len(lines)):
            while len(running) < _AHEAD and (item := next(left, None)) is not None:
                running[item[0]] = asyncio.create_task(_answer_line(service, *item))
            answer, is_error = await running.pop(next_line)
            errors += is_error
            output.write(json.dumps(answer, ensure_ascii=False).encode() + b"\n")
            output.flush()
            os.fsync(output.fileno())
            on_progress(next_line + 1)
    finally:
        for task in running.values():
            task.cancel()
    return errors


async def _answer_line(service: Service, number: int, line: bytes) -> tuple[Any, bool]:
    """Return the answer to a line, and True if it is an error."""
    try:
        request = parsed(line)
    except ApiError as error:
        return error.body, True
    if "url" not in request:
        try:
            return await _written(service, CARD, line), False
        except ApiError as error:
            return error.body, True
    status, body, failed = 200, None, None
    try:
        if request.get("method", "POST") != "POST" or not isinstance(request.get("body"), dict):
            raise ApiError(400, "expected the method POST and a body that is an object")
        body = await _written(service, str(request["url"]), json.dumps(request["body"]))
    except ApiError as error:
        status, body, failed = error.status, error.body, error.body["error"]
    name = f"{hashlib.sha256(line).hexdigest()[:16]}_{number}"
    return {
        "id": f"batch_req_{name}",
        "custom_id": request.get("custom_id"),
        "response": {"status_code": status, "request_id": f"req_{name}", "body": body},
        "error": failed and {"code": failed["code"] or str(status), "message": failed["message"]},
    }, failed is not None


async def _written(service: Service, path: str, raw: bytes | str) -> Any:
    """Return a whole answer.

    Raises:
        ApiError: if the request cannot be answered.
    """
    try:
        return await (await _begun(service, path, raw)).body()
    except HeadwaterError as error:
        failed = of_project(error)
        if failed.status >= 500 and not isinstance(error, NonFiniteError):
            raise  # the model has failed: the file stays as it is, and the next run continues
        raise failed from error
    except ApiError:
        raise
    except Exception as error:
        logger.exception("a request failed")
        raise ApiError(500, f"the request failed: {error!r}") from error


async def _begun(service: Service, path: str, raw: bytes | str) -> Answer:
    """Return an answer that has begun. Wait while too many texts wait for the model.

    Raises:
        ApiError: if the request cannot be answered.
        HeadwaterError: if the model has failed.
    """
    while True:
        try:
            return await service.answer(path, raw)
        except ApiError as error:
            if isinstance(error.__cause__, HeadwaterError) and error.status >= 500:
                raise error.__cause__ from error
            if error.status != TOO_MANY:
                raise
        await asyncio.sleep(_PAUSE_SECONDS)
