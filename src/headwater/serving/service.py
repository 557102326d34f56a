"""Answers to requests in JSON, whether they come over HTTP or from a file."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, final

from pydantic import ValidationError

from headwater.core.errors import HeadwaterError
from headwater.serving.answer import Answer
from headwater.serving.answers import CardAnswer, Chat, Completion
from headwater.serving.errors import TOO_MANY, ApiError, of_project, of_validation
from headwater.serving.filling import FillAnswer, ServedFiller
from headwater.serving.schemas import MOST_TEXTS, CardRequest, ChatRequest, CompletionRequest
from headwater.serving.writing import ServedModel

COMPLETIONS, CHAT, CARD = "/v1/completions", "/v1/chat/completions", "/score"
"""Paths of requests that generate text."""

_SCHEMAS: dict[str, type[CompletionRequest] | type[ChatRequest] | type[CardRequest]] = {
    COMPLETIONS: CompletionRequest,
    CHAT: ChatRequest,
    CARD: CardRequest,
}

_SMALL_BODY = 2**15
"""Most bytes of a request that is read in the asyncio loop, which takes a few milliseconds."""
_MOST_WAITING = 4096
"""Texts that may wait for a model, and requests that may wait for a thread that reads them."""


@final
class Service:
    """Models that answer requests.

    Args:
        models: the models by name; the first one answers requests that name no model.
    """

    def __init__(self, models: Mapping[str, ServedModel | ServedFiller]) -> None:
        self.models = models
        generating = (model for model in models.values() if isinstance(model, ServedModel))
        self._finds_passages = any(model.passages is not None for model in generating)
        self._readers = _Readers("headwater-serve-read")
        # Separate threads, because the search for passages may take longer than reading a large request.
        self._finders = _Readers("headwater-serve-find")

    async def answer(self, path: str, raw: bytes | str) -> Answer:
        """Begin to answer a request, in the asyncio loop that reads the answer.

        Another thread reads and tokenizes a large request, or one for which passages are found, so that it
        does not delay the others.

        Args:
            path: path of the request, one of those above.
            raw: its body.

        Raises:
            ApiError: if the path is unknown, the request is malformed or does not fit the model, or the model
                has failed.
        """
        try:
            finds = path == CHAT and self._finds_passages
            if len(raw) <= _SMALL_BODY and not finds:
                answer = self._read(path, raw)
            else:
                readers = self._finders if finds else self._readers
                answer = await readers.run(lambda: self._read(path, raw))
                _check_queue(self.models[answer.model_name], answer.num_texts)  # the queue may be longer now
            answer.begin()
        except HeadwaterError as error:
            raise of_project(error) from error
        return answer

    def _read(self, path: str, raw: bytes | str) -> Answer:
        """Return an answer that has not begun. Any thread may call this."""
        if path not in _SCHEMAS:
            raise ApiError(404, f"there is nothing at {path[:200]}; remedy: use one of {', '.join(_SCHEMAS)}")
        try:
            body = _SCHEMAS[path].model_validate(parsed(raw))
        except ValidationError as error:
            raise of_validation(error, _SCHEMAS[path]) from error
        model = self.model(body.model)
        _check_count(body.count)
        _check_queue(model, body.count)
        if isinstance(model, ServedFiller):
            if not isinstance(body, CardRequest):
                message = f"{model.name} fills in mask tokens, and writes no texts; remedy: send it to {CARD}"
                raise ApiError(400, message, param="model")
            return FillAnswer(model, body)
        if isinstance(body, CompletionRequest):
            return Completion(model, body)
        return Chat(model, body) if isinstance(body, ChatRequest) else CardAnswer(model, body)

    def model(self, name: str | None) -> ServedModel | ServedFiller:
        """Return a model.

        Raises:
            ApiError: if no model has this name.
        """
        if name is None:
            return next(iter(self.models.values()))
        if name not in self.models:
            listed = ", ".join(self.models)
            raise ApiError(
                404,
                f"the model {name[:100]!r} does not exist; remedy: use one of {listed}",
                param="model",
                code="model_not_found",
            )
        return self.models[name]

    def close(self) -> None:
        """End the threads that read requests."""
        self._readers.close()
        self._finders.close()


@final
class _Readers:
    """Two threads that read requests. Used only in the asyncio loop.

    Args:
        name: beginning of the threads' names.
    """

    def __init__(self, name: str) -> None:
        self._threads = ThreadPoolExecutor(2, name)
        self._count = 0

    async def run(self, read: Callable[[], Answer]) -> Answer:
        """Return the result of `read`, which one of the threads calls.

        Raises:
            ApiError: if too many requests wait for a thread; see also `Service.answer`.
        """
        # Without this check the queue of the threads has no limit.
        _check_room(self._count, 1)
        self._count += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, read)
        finally:
            self._count -= 1

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(cancel_futures=True)


def parsed(raw: bytes | str) -> dict[str, Any]:
    """Return the object that a body has.

    Raises:
        ApiError: if it is not a JSON object.
    """
    try:
        text = raw if isinstance(raw, str) else raw.decode("utf-8-sig")
        body = json.loads(text)
        # Half a surrogate pair is valid JSON, but it is not text.
        if "\\ud" in text or "\\uD" in text:
            json.dumps(body, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"expected a JSON object as the body: {error}", code="invalid_json") from error
    if not isinstance(body, dict):
        raise ApiError(400, f"expected a JSON object as the body, got {type(body).__name__}")
    return body


def _check_queue(model: ServedModel | ServedFiller, count: int) -> None:
    """Raise `ApiError` if too many texts would wait for a model after a request for `count` texts."""
    _check_room(model.worker.waiting, count)


def _check_room(waiting: int, count: int) -> None:
    """Raise `ApiError` if `count` more would exceed the number that may wait."""
    if waiting + count > _MOST_WAITING:
        message = (
            f"expected at most {_MOST_WAITING} waiting texts, got {count} more while {waiting} are waiting; "
            "remedy: send the request again later"
        )
        raise ApiError(TOO_MANY, message, code="overloaded")


def _check_count(count: int) -> None:
    """Raise `ApiError` if a request asks for too many texts."""
    if count > MOST_TEXTS:
        raise ApiError(400, f"expected at most {MOST_TEXTS} texts, got {count}; remedy: divide the request")
