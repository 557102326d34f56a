"""Answers to requests in JSON, whether they come over HTTP or from a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, final

from pydantic import ValidationError

from headwater.core.errors import HeadwaterError
from headwater.serving.answers import Answer, CardAnswer, Chat, Completion
from headwater.serving.errors import TOO_MANY, ApiError, of_project, of_validation
from headwater.serving.schemas import MOST_TEXTS, CardRequest, ChatRequest, CompletionRequest
from headwater.serving.writing import ServedModel

COMPLETIONS, CHAT, CARD = "/v1/completions", "/v1/chat/completions", "/score"
"""Paths of requests that generate text."""

_SCHEMAS: dict[str, type[CompletionRequest] | type[ChatRequest] | type[CardRequest]] = {
    COMPLETIONS: CompletionRequest,
    CHAT: ChatRequest,
    CARD: CardRequest,
}

_MOST_WAITING = 4096
"""Texts that may wait for a model; at least those of one request."""


@final
class Service:
    """Models that answer requests.

    Args:
        models: the models by name; the first one answers requests that name no model.
    """

    def __init__(self, models: Mapping[str, ServedModel]) -> None:
        self.models = models

    def answer(self, path: str, raw: bytes | str) -> Answer:
        """Begin to answer a request. Call this in the asyncio loop that reads the answer.

        Args:
            path: path of the request, one of those above.
            raw: its body.

        Raises:
            ApiError: if the path is unknown, the request is malformed or does not fit the model, or the model
                has failed.
        """
        if path not in _SCHEMAS:
            raise ApiError(404, f"there is nothing at {path[:200]}; remedy: use one of {', '.join(_SCHEMAS)}")
        try:
            body = _SCHEMAS[path].model_validate(parsed(raw))
        except ValidationError as error:
            raise of_validation(error) from error
        try:
            return self._begin(body)
        except HeadwaterError as error:
            raise of_project(error) from error

    def _begin(self, body: CompletionRequest | ChatRequest | CardRequest) -> Answer:
        model = self.model(body.model)
        _check_count(body.count)
        _check_queue(model, body.count)
        if isinstance(body, CompletionRequest):
            return Completion(model, body)
        return Chat(model, body) if isinstance(body, ChatRequest) else CardAnswer(model, body)

    def model(self, name: str | None) -> ServedModel:
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
        """Cancel all texts, and end the threads of the models."""
        for model in self.models.values():
            model.worker.close()


def parsed(raw: bytes | str) -> dict[str, Any]:
    """Return the object that a body has.

    Raises:
        ApiError: if it is not a JSON object.
    """
    try:
        body = json.loads(raw)
        # Half a surrogate pair is valid JSON, but it is not text.
        json.dumps(body, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"expected a JSON object as the body: {error}", code="invalid_json") from error
    if not isinstance(body, dict):
        raise ApiError(400, f"expected a JSON object as the body, got {type(body).__name__}")
    return body


def _check_queue(model: ServedModel, count: int) -> None:
    """Raise `ApiError` if too many texts would wait for a model after a request for `count` texts."""
    waiting = model.worker.waiting
    if waiting + count > _MOST_WAITING:
        message = f"{waiting} texts are waiting; remedy: send the request again later"
        raise ApiError(TOO_MANY, message, code="overloaded")


def _check_count(count: int) -> None:
    """Raise `ApiError` if a request asks for too many texts."""
    if count > MOST_TEXTS:
        raise ApiError(400, f"expected at most {MOST_TEXTS} texts, got {count}; remedy: divide the request")
