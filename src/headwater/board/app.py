"""The web application of the board. It only passes requests on; `Board` and `Jobs` answer them."""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import AsyncIterator
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headwater.board.board import Board
from headwater.board.content import Document
from headwater.board.jobs import Jobs
from headwater.core.errors import HeadwaterError

_EVENT_S = 0.5
_KEEP_ALIVE_S = 15.0
_MOST_POINTS = 2000
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}


def make_app(board: Board, jobs: Jobs | None, token: str) -> Starlette:
    """Return the web application.

    The page and its script are public, since they hold no data. All requests below `/api` need the header
    `Authorization: Bearer TOKEN`. The token is not in a cookie, so other pages in the browser cannot act as
    the user.

    Args:
        board: the runs; the caller enters it.
        jobs: the jobs of the queue; `None` to show runs alone.
        token: the token.
    """

    async def page(_: Request) -> Response:
        return FileResponse(str(_static() / "index.html"))

    async def state(_: Request) -> Response:
        return _Json(await run_in_threadpool(_state, board, jobs))

    async def events(_: Request) -> Response:
        return StreamingResponse(_events(board, jobs), media_type="text/event-stream")

    async def curves(request: Request) -> Response:
        points = _points(request.query_params.get("points", ""))
        names = request.query_params.getlist("run")
        return _Json(await run_in_threadpool(board.curves, names, points))

    async def details(request: Request) -> Response:
        return _Json(await run_in_threadpool(board.details, _asked(request, "run")))

    async def log(request: Request) -> Response:
        text = await run_in_threadpool(board.log, _asked(request, "run"), _asked(request, "log"))
        return PlainTextResponse(text)

    async def timeline(request: Request) -> Response:
        return FileResponse(await run_in_threadpool(board.timeline, _asked(request, "run")))

    async def cancel(request: Request) -> Response:
        (name,) = await _fields(request, "name")
        return _Json(await run_in_threadpool(_present(jobs).cancel, name))

    async def priority(request: Request) -> Response:
        name, chosen = await _fields(request, "name", "priority")
        return _Json(await run_in_threadpool(_present(jobs).set_priority, name, chosen))

    api = [
        *(Route(f"/{each.__name__}", each) for each in (state, events, curves, details, log, timeline)),
        Route("/jobs/cancel", cancel, methods=["POST"]),
        Route("/jobs/priority", priority, methods=["POST"]),
    ]
    return Starlette(
        routes=[
            Route("/", page),
            Mount("/api", routes=api, middleware=[Middleware(_Protected, token=token)]),
            Mount("/static", StaticFiles(directory=str(_static()))),
        ],
        middleware=[Middleware(_WithHeaders)],
        exception_handlers={HeadwaterError: _refused},
    )


def _static() -> Any:
    return files("headwater.board") / "static"


def _state(board: Board, jobs: Jobs | None) -> Document:
    return {**board.document(), "jobs": None if jobs is None else jobs.document()}


async def _events(board: Board, jobs: Jobs | None) -> AsyncIterator[str]:
    """Yield the state as a server-sent event whenever it has changed, and a comment if it stays the same."""
    sent, silent_s = "", 0.0
    while True:
        document = await run_in_threadpool(_state, board, jobs)
        now = document.pop("now")
        text = json.dumps(document)
        if text != sent:
            yield f"data: {json.dumps({**document, 'now': now})}\n\n"
            sent, silent_s = text, 0.0
        elif silent_s >= _KEEP_ALIVE_S:
            yield ": nothing new\n\n"
            silent_s = 0.0
        await asyncio.sleep(_EVENT_S)
        silent_s += _EVENT_S


def _points(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text[:6]) <= _MOST_POINTS:
        raise HTTPException(400, f"expected points of 1 to {_MOST_POINTS}")
    return int(text)


def _asked(request: Request, name: str) -> str:
    if name not in request.query_params:
        raise HTTPException(400, f"expected the parameter {name!r}")
    return request.query_params[name]


async def _fields(request: Request, *names: str) -> list[str]:
    """Return the fields of a JSON body, which are all texts."""
    try:
        body = json.loads(await request.body())
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict) or not all(isinstance(body.get(name), str) for name in names):
        raise HTTPException(400, f"expected a JSON object with the texts {', '.join(names)}")
    return [body[name] for name in names]


def _present(jobs: Jobs | None) -> Jobs:
    if jobs is None:
        raise HTTPException(404, "this board does not show the jobs of a queue")
    return jobs


def _refused(_: Request, error: Exception) -> Response:
    return _Json({"error": str(error)}, status_code=400)


class _Json(JSONResponse):
    """An answer in JSON. It is ASCII, because names of folders and words of commands may not be UTF-8."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False).encode()


class _Protected:
    """Refuses requests without the token."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = dict(scope["headers"]).get(b"authorization", b"")
        # The same time for every wrong token, so that the time tells nothing about the right one.
        if hmac.compare_digest(given, self._expected):
            await self._app(scope, receive, send)
        else:
            await _Json({"error": "the token is missing or wrong"}, status_code=401)(scope, receive, send)


class _WithHeaders:
    """Adds headers that keep the page from loading anything from elsewhere."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                more = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *more]}
            await send(message)

        await self._app(scope, receive, with_headers)
