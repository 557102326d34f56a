"""The server as an ASGI application. Needs the package starlette."""

from __future__ import annotations

import asyncio
import hmac
import importlib.resources
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from headwater.core.errors import HeadwaterError
from headwater.serving.answer import Answer
from headwater.serving.answers import OpenAIAnswer
from headwater.serving.errors import ApiError, of_project
from headwater.serving.metrics import Metrics
from headwater.serving.process import is_loopback
from headwater.serving.service import CARD, CHAT, COMPLETIONS, Service

LARGEST_BODY = 16 * 2**20
"""Most bytes of a request."""
_CLIENT_CLOSED = 499
"""Status code in the metrics for a request whose client has left."""


@final
class Server:
    """The endpoints of a server.

    Args:
        service: answers requests.
        token: what requests must send as `Authorization: Bearer`; `None` on a loopback address.
    """

    def __init__(self, service: Service, token: str | None = None) -> None:
        self._service = service
        self._token = token
        self._metrics = Metrics()

    def app(self) -> Starlette:
        """Return the application."""
        generating = [self._post(path) for path in (COMPLETIONS, CHAT, CARD)]
        routes = [
            *generating,
            self._get("/v1/models", self._list),
            self._get("/v1/models/{name:path}", self._show),
            self._get("/metrics", self._counters),
            Route("/health", self._health),
            Route("/", self._page),
        ]
        handlers = {ApiError: _api_error, HTTPException: _http_error, Exception: _unknown_error}
        return Starlette(routes=routes, exception_handlers=handlers)  # type: ignore[arg-type]

    def _get(self, path: str, answer: Callable[[Request], Awaitable[Response]]) -> Route:
        async def endpoint(request: Request) -> Response:
            self._check_caller(request)
            return await answer(request)

        return Route(path, endpoint, methods=["GET"])

    def _post(self, path: str) -> Route:
        async def endpoint(request: Request) -> Response:
            start = time.monotonic()
            try:
                self._check_caller(request)
                response = await self._generate(path, request, start)
            except ApiError as error:
                self._metrics.answered(path, error.status, time.monotonic() - start)
                raise
            if not isinstance(response, StreamingResponse):
                self._metrics.answered(path, response.status_code, time.monotonic() - start)
            return response

        return Route(path, endpoint, methods=["POST"])

    def _check_caller(self, request: Request) -> None:
        """Raise `ApiError` if the caller may not use the server."""
        if self._token is None:
            # A page of another site must not reach the server through the user's browser.
            host = request.headers.get("host", "")
            name = host if host.endswith("]") else host.rpartition(":")[0] or host
            origin = request.headers.get("origin")
            if not is_loopback(name.strip("[]")) or (origin is not None and origin != f"http://{host}"):
                raise ApiError(
                    403,
                    "expected a request from this machine, because the server has no token",
                    code="forbidden",
                )
            return
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not hmac.compare_digest(given.encode(), self._token.encode()):
            raise ApiError(
                401,
                "the token is missing or wrong; remedy: send the header Authorization: Bearer TOKEN, "
                "or give the token as api_key to the client",
                code="invalid_api_key",
            )

    async def _generate(self, path: str, request: Request, start: float) -> Response:
        answer = await self._service.answer(path, await _body(request))
        if isinstance(answer, OpenAIAnswer) and answer.streams:
            return StreamingResponse(
                self._events(path, answer, start),
                media_type="text/event-stream",
                headers={"Cache-Control": "no-store"},
            )
        writing = asyncio.create_task(answer.body())
        leaving = asyncio.create_task(_left(request))
        try:
            await asyncio.wait([writing, leaving], return_when=asyncio.FIRST_COMPLETED)
            if not writing.done():
                self._metrics.disconnected()
                return Response(status_code=_CLIENT_CLOSED)
            return JSONResponse(writing.result())
        except HeadwaterError as error:
            raise of_project(error) from error
        finally:
            self._count(answer)
            writing.cancel()
            leaving.cancel()

    async def _events(self, path: str, answer: OpenAIAnswer, start: float) -> AsyncIterator[str]:
        """Yield an answer as server-sent events. If the client leaves, the task is cancelled here."""
        status, first = _CLIENT_CLOSED, True
        try:
            async for chunk in answer.chunks():
                yield _event(chunk)
                if first and answer.num_tokens:
                    first = False
                    self._metrics.first_text(time.monotonic() - start)
            status = 200
        except HeadwaterError as error:
            failed = of_project(error)
            status = failed.status
            yield _event(failed.body)
        finally:
            answer.cancel()
            self._count(answer)
            self._metrics.answered(path, status, time.monotonic() - start)
            if status == _CLIENT_CLOSED:
                self._metrics.disconnected()
        yield "data: [DONE]\n\n"

    def _count(self, answer: Answer) -> None:
        self._metrics.used(answer.model_name, answer.prompt_tokens, answer.num_tokens)

    async def _list(self, request: Request) -> Response:
        names = list(self._service.models)
        return JSONResponse({"object": "list", "data": [self._described(name) for name in names]})

    async def _show(self, request: Request) -> Response:
        return JSONResponse(self._described(self._service.model(request.path_params["name"]).name))

    def _described(self, name: str) -> dict[str, object]:
        model = self._service.models[name]
        length = model.worker.max_length
        return {
            "id": name,
            "object": "model",
            "created": model.created,
            "owned_by": "headwater",
            "max_model_len": length,
        }

    async def _counters(self, request: Request) -> Response:
        text = self._metrics.text(self._service.models)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    async def _health(self, request: Request) -> Response:
        failed = [name for name, model in self._service.models.items() if model.worker.error is not None]
        content = {"status": "failed" if failed else "ok", "failed_models": failed}
        return JSONResponse(content, status_code=503 if failed else 200)

    async def _page(self, request: Request) -> Response:
        page = importlib.resources.files("headwater.serving").joinpath("chat.html")
        return HTMLResponse(
            page.read_text(encoding="utf-8"),
            headers={
                "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; "
                "style-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
                "frame-ancestors 'none'"
            },
        )


async def _body(request: Request) -> bytes:
    """Return the body of a request.

    Raises:
        ApiError: if it is too large, or the client leaves.
    """
    parts, size = [], 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > LARGEST_BODY:
                raise ApiError(
                    413, f"expected a body of at most {LARGEST_BODY} bytes; remedy: send less text"
                )
            parts.append(part)
    except ClientDisconnect as error:
        raise ApiError(_CLIENT_CLOSED, "the client has left") from error
    return b"".join(parts)


async def _left(request: Request) -> None:
    """Return when the client has left. The body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _event(content: object) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False, separators=(',', ':'))}\n\n"


async def _api_error(request: Request, error: ApiError) -> Response:
    headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else None
    return JSONResponse(error.body, status_code=error.status, headers=headers)


async def _http_error(request: Request, error: HTTPException) -> Response:
    named = {404: "there is nothing at this path", 405: "this path needs another HTTP method"}
    message = f"{named.get(error.status_code, error.detail)}: {request.method} {request.url.path[:200]}"
    return JSONResponse(ApiError(error.status_code, message).body, error.status_code, headers=error.headers)


async def _unknown_error(request: Request, error: Exception) -> Response:
    return JSONResponse(ApiError(500, "the server failed; remedy: see its log").body, 500)
