"""Errors in OpenAI's form: a status, a sentence, a type; never a stack trace."""

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from orca_hf.errors import OrcaError

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}


class ApiError(HTTPException):
    """What a client is told.

    Args:
        status: Of the answer.
        message: What was given, what is allowed and what to do.
        param: The request's field that it is about.
        code: OpenAI's word for it, where it has one.
        headers: Of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers) if headers else None)
        self.param = param
        self.code = code


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A request that no repetition mends."""
    return ApiError(400, message, param=param, code=code)


def shutting_down() -> ApiError:
    """For what comes, or is not done, while the server ends."""
    return ApiError(503, "The server is shutting down.", code="shutting_down")


def shortened(text: str, length: int) -> str:
    """The beginning of a text that may quote all that a client has sent."""
    return text if len(text) <= length else text[:length] + "..."


def error_body(error: HTTPException) -> dict[str, Any]:
    """The JSON that tells a client of `error`."""
    message = str(error.detail).encode(errors="replace").decode()  # it may quote what is no text
    kind = _TYPES.get(error.status_code, "invalid_request_error")
    param, code = getattr(error, "param", None), getattr(error, "code", None)
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def as_api_error(error: Exception) -> HTTPException:
    """What a client may know of `error`: all of what is its own fault, and of anything else that it happened."""
    if isinstance(error, HTTPException):
        return error
    if isinstance(error, OrcaError) and isinstance(error, ValueError | IndexError):
        return bad_request(str(error))
    return ApiError(500, "The server failed to answer this request; its log says why.", code="internal_error")


def error_response(error: HTTPException) -> JSONResponse:
    """An answer that is an error."""
    return JSONResponse(error_body(error), error.status_code, error.headers)


def add_error_handlers(app: FastAPI) -> None:
    """Every way in which a request fails, in OpenAI's form."""

    async def known(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        return error_response(error if isinstance(error, ApiError) else _no_such_route(request, error))

    async def malformed(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        # FastAPI's places begin with where in the request a value stood: the body, the query.
        faults = [{**fault, "loc": fault["loc"][1:]} for fault in error.errors()]
        return error_response(validation_error(faults))

    app.add_exception_handler(HTTPException, known)
    app.add_exception_handler(RequestValidationError, malformed)


def _no_such_route(request: Request, error: HTTPException) -> ApiError:
    """Starlette's error for an address or a method that no route has, in words that say what is there."""
    path = repr(request.url.path[:200])
    allowed = Headers(error.headers).get("allow", "another method")
    words = {
        404: f"There is nothing at {path}. /openapi.json says what there is.",
        405: f"{request.method} is not allowed at {path}, but {allowed}.",
    }
    return ApiError(error.status_code, words.get(error.status_code, str(error.detail)), headers=error.headers)


def validation_error(faults: Sequence[Any]) -> ApiError:
    """The first of pydantic's errors: where it is, what is allowed there, what was given."""
    first = faults[0]
    if first["type"] == "json_invalid":
        return bad_request(f"The body is not JSON: {first['ctx']['error']}.")
    place = _place(first["loc"])
    if first["type"] == "missing":
        return bad_request(f"{place or 'The body'} is required, and is missing.", place or None)
    message = first["msg"]
    if first["type"].startswith(("model_", "dict_")):  # which speak of Python's types
        message = "Input should be a JSON object"
    given = "" if first["type"] == "no_text" else f"; got {_shown(first['input'])}"  # which says it itself
    return bad_request(f"{place or 'The body'}: {message}{given}.", place or None)


def _place(loc: Sequence[int | str]) -> str:
    """As JavaScript writes it: messages[3].content."""
    place = ""
    for part in loc:
        if isinstance(part, int):
            place += f"[{part}]"
        elif not part.startswith("<") and part != "[key]":  # words for one of several forms, and pydantic's own
            place += f".{part[:64]}" if place else part[:64]
    return place


def _shown(value: Any) -> str:
    """What was given, if it is short and says nothing that a log should not have; else what kind of thing it is."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return str(value)
    if isinstance(value, int):
        return str(value) if value.bit_length() <= 64 else f"a number of {value.bit_length()} bits"
    if isinstance(value, str):
        return f"a text of {_count(len(value), 'character')}"
    if isinstance(value, list):
        return f"a list of {_count(len(value), 'item')}"
    return "an object"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
