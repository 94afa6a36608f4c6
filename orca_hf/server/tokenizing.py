"""`/tokenize` and `/detokenize`."""

from collections.abc import Callable
from typing import Any

from fastapi import Request
from starlette.responses import Response

from orca_hf.server.answers import until_gone
from orca_hf.server.completions import CLIENT_GONE
from orca_hf.server.errors import bad_request
from orca_hf.server.json_text import as_json
from orca_hf.server.protocol import DetokenizeRequest, TokenizeRequest
from orca_hf.server.service import Form, Service


async def tokenize(service: Service, request: Request) -> Response:
    """Answers with the tokens of a text or a chat."""
    return await _answered(service, request, TokenizeRequest, _tokens)


async def detokenize(service: Service, request: Request) -> Response:
    """Answers with the text of tokens."""
    return await _answered(service, request, DetokenizeRequest, _text)


async def _answered(
    service: Service, request: Request, form: type[Form], work: Callable[[Service, Form], dict[str, Any]]
) -> Response:
    """Has `work` done as a part of a request's preparation is, with its place among the others and its turn."""
    body = await request.body()
    call = service.admit(request.scope["client_name"], len(body))

    async def answer() -> str:
        asked = await service.read(call, body, form)
        return await call.run(lambda: as_json(work(service, asked)))

    try:
        content = await until_gone(answer(), request.receive)
    finally:
        call.ticket.give_back()
    return Response(status_code=CLIENT_GONE) if content is None else Response(content, media_type="application/json")


def _tokens(service: Service, asked: TokenizeRequest) -> dict[str, Any]:
    if asked.messages is not None and asked.prompt is None:
        tokens = service.prompts.of_chat(asked.messages)
    elif asked.prompt is not None and asked.messages is None:
        tokens = service.prompts.of_text(asked.prompt, add_special_tokens=asked.add_special_tokens)
    else:
        raise bad_request("Give either prompt or messages.", "prompt")
    return {"count": len(tokens), "max_model_len": service.settings.max_model_len, "tokens": tokens}


def _text(service: Service, asked: DetokenizeRequest) -> dict[str, Any]:
    return {"prompt": service.decoder.decode(asked.tokens)}
