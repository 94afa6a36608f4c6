"""Errors in OpenAI's form: a status, a sentence, a type; never a stack trace."""

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
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
        return error_response(as_api_error(error))

    async def malformed(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return error_response(_validation_error(error.errors()))

    app.add_exception_handler(HTTPException, known)
    app.add_exception_handler(RequestValidationError, malformed)


def _validation_error(errors: Sequence[Any]) -> ApiError:
    first = errors[0]
    place = [str(part) for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        return bad_request(f"The body is not JSON: {first['ctx']['error']}.")
    if first["type"] == "extra_forbidden":
        return bad_request(f"Unrecognized request argument supplied: {place[-1]}", place[-1], "unknown_parameter")
    param = place[0] if place else None  # what follows are pydantic's words for alternatives
    # The value itself stays out: it may be long, secret or no text at all.
    return bad_request(f"{param or 'body'}: {first['msg']}", param)
