"""The bodies of requests, from bytes to what the protocol knows; and their schemas in the server's description.

FastAPI would parse and judge them on the event loop, where a body of 4 MB can take minutes. On a thread of its own it
still holds the interpreter's lock for as long as one call of a C function takes. So what makes these calls long is
bounded first: objects, lists and strings by a scan of the bytes, and errors by ending at the first.
"""

from codecs import BOM_UTF8
from collections.abc import Iterable
from typing import Any, TypeVar

from fastapi import FastAPI
from pydantic import BaseModel, ValidationError
from pydantic.json_schema import models_json_schema
from pydantic_core import from_json

from orca_hf.server.errors import bad_request, validation_error

Form = TypeVar("Form", bound=BaseModel)

# Far more than a request has that could be answered, whose numbers alone, as token ids, may be as many as bytes allow.
# Of lists and objects fewer: once there are many, Python's garbage collector looks at all that the process has.
_MAX_CONTAINERS = 2**14
_MAX_STRINGS = 2**16
_SCHEMAS = "#/components/schemas/{model}"


def parse(body: bytes, form: type[Form], max_tokens: int) -> Form:
    """A request from its body.

    Args:
        body: JSON.
        form: Of the request.
        max_tokens: Of each list of token ids in it.

    Raises:
        ApiError: It is not JSON, too intricate, or not of this form.
    """
    body = body.removeprefix(BOM_UTF8)  # as RFC 8259 allows
    _check_size(body)
    try:
        value = from_json(body)  # stops at a depth of 200
    except ValueError as error:
        raise bad_request(f"The body is not JSON: {error}.") from error
    try:
        return form.model_validate(value, context={"max_tokens": max_tokens})
    except ValidationError as error:
        raise validation_error(error.errors(include_url=False)) from error


def _check_size(body: bytes) -> None:
    """Counts without parsing: exactly as far as the body is JSON, and further nobody reads it."""
    plain = body.replace(rb"\\", b"").replace(rb"\"", b"")  # now every quotation mark begins or ends a string
    _refuse_above(_MAX_STRINGS, plain.count(b'"') // 2, "strings")
    outside = b"".join(plain.split(b'"')[::2])
    _refuse_above(_MAX_CONTAINERS, outside.count(b"[") + outside.count(b"{"), "lists and objects")


def _refuse_above(limit: int, number: int, what: str) -> None:
    if number > limit:
        raise bad_request(f"The body has {number} {what}; at most {limit} are taken. Send several requests.")


def takes(form: type[BaseModel]) -> dict[str, Any]:
    """What the description of a route says of its body; for FastAPI's `openapi_extra`."""
    schema = {"$ref": _SCHEMAS.format(model=form.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def describe(app: FastAPI, forms: Iterable[type[BaseModel]]) -> None:
    """Adds the schemas of bodies to what /openapi.json says."""
    _, found = models_json_schema([(form, "validation") for form in forms], ref_template=_SCHEMAS)
    without_bodies = app.openapi

    def openapi() -> dict[str, Any]:
        description = without_bodies()
        description.setdefault("components", {}).setdefault("schemas", {}).update(found["$defs"])
        return description

    app.openapi = openapi  # type: ignore[method-assign]
