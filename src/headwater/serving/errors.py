"""Errors of requests, in the form of OpenAI's API."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from headwater.core.errors import ConfigError, DataError, HeadwaterError
from headwater.core.names import nearest
from headwater.serving.schemas import Section, known_keys

TOO_MANY = 429
"""Status code of a request that the server may answer later."""


class ApiError(Exception):
    """A request that cannot be answered.

    Args:
        status: status code of HTTP.
        message: the fault, and what helps.
        param: the key of the request, if one is wrong.
        code: short name of the fault.

    Attributes:
        status: see above.
        body: the answer.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.body: dict[str, Any] = {
            "error": {"message": message, "type": kind, "param": param, "code": code}
        }


def of_project(error: HeadwaterError) -> ApiError:
    """Return the error of a request for an error of this package."""
    parts = [error.what, error.remedy and f"remedy: {error.remedy}"]
    message = "; ".join(part for part in parts if part)
    # Errors of data and arguments come from the request; the others come from the server.
    return ApiError(400 if isinstance(error, ConfigError | DataError) else 500, message)


def of_validation(error: ValidationError, schema: type[Section]) -> ApiError:
    """Return the error of a request whose keys or values are wrong.

    Args:
        error: the first error is reported, unknown keys before wrong values.
        schema: the keys of the request.
    """
    found = error.errors(include_url=False, include_context=False, include_input=False)
    first = min(found, key=lambda each: (each["type"] != "extra_forbidden", len(each["loc"])))
    place = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        *path, key = first["loc"]
        close = nearest(str(key), known_keys(schema, path))
        message = f"{place} is not supported; remedy: {f'write {close}, or ' if close else ''}remove it"
    else:
        message = f"{place or 'the request'}: {first['msg'][:1].lower()}{first['msg'][1:]}"
    return ApiError(400, message, param=place or None)
