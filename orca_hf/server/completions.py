"""`/v1/completions` and `/v1/chat/completions`: start, then stream or collect."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from starlette.responses import Response

from orca_hf.server.answers import Answers, Piece, until_gone
from orca_hf.server.echoes import echoes
from orca_hf.server.json_text import in_pieces
from orca_hf.server.options import Options
from orca_hf.server.protocol import ChatRequest, CompletionRequest, GenerationRequest, StreamOptions
from orca_hf.server.responses import ChatWriter, CompletionWriter, joined, usage
from orca_hf.server.service import Call, Service
from orca_hf.server.stream import EventStream

CLIENT_GONE = 499  # nobody reads it; what web servers' logs call it
Writer = CompletionWriter | ChatWriter


@dataclass(frozen=True, slots=True)
class _Begun:
    """A request whose answers are on their way.

    Attributes:
        request: It.
        options: What of it is generate()'s.
        answers: Its answers.
        echo: What stands before them, in pieces.
        num_prompt_tokens: Of all prompts.
    """

    request: GenerationRequest
    options: Options
    answers: Answers
    echo: Sequence[Piece]
    num_prompt_tokens: int


async def completion(service: Service, request: Request) -> Response:
    """Answers a completion."""
    return await _respond(service, request, CompletionRequest, CompletionWriter)


async def chat_completion(service: Service, request: Request) -> Response:
    """Answers a chat."""
    return await _respond(service, request, ChatRequest, ChatWriter)


async def _respond(
    service: Service, request: Request, form: type[GenerationRequest], make_writer: type[Writer]
) -> Response:
    body = await request.body()
    call = service.admit(request.scope["client_name"], len(body))
    begun: _Begun | None = None
    try:
        begun = await until_gone(_begin(service, call, body, form), request.receive)
    finally:
        if begun is None:
            call.ticket.give_back()
    if begun is None:
        return Response(status_code=CLIENT_GONE)
    with_logprobs = begun.options.logprobs is not None
    writer = make_writer(service.settings.model_names[0], service.texts, with_logprobs=with_logprobs)
    if begun.request.stream:
        return EventStream(_chunks(begun, writer), service.settings.stall_timeout, begun.answers.close)
    try:
        content = await until_gone(_whole(begun, writer, call), request.receive)
    finally:
        begun.answers.close()
    if content is None:
        return Response(status_code=CLIENT_GONE)
    return Response(content, media_type="application/json")


async def _begin(service: Service, call: Call, body: bytes, form: type[GenerationRequest]) -> _Begun:
    request = await service.read(call, body, form)
    answers, options, prompts = await service.start(request, call)
    echo: Sequence[Piece] = ()
    if isinstance(request, CompletionRequest) and request.echo:
        try:
            echo = await echoes(service, call, request, options, answers)
        except BaseException:
            answers.close()
            raise
    return _Begun(request, options, answers, echo, sum(map(len, prompts)))


async def _chunks(begun: _Begun, writer: Writer) -> AsyncIterator[dict[str, Any]]:
    options = begun.request.stream_options or StreamOptions()
    num_tokens = 0
    async for piece in _pieces(begun):
        chunk = writer.chunk(piece)
        num_tokens += len(piece.tokens)
        if options.include_usage:
            so_far = usage(begun.num_prompt_tokens, num_tokens) if options.continuous_usage_stats else None
            chunk = {**chunk, "usage": so_far}
        yield chunk
    if options.include_usage:
        yield writer.usage_chunk(usage(begun.num_prompt_tokens, num_tokens))


async def _pieces(begun: _Begun) -> AsyncIterator[Piece]:
    for piece in begun.echo:
        await asyncio.sleep(0)  # they are all there, and must not keep the loop from other requests
        yield piece
    async for piece in begun.answers.pieces():
        yield piece


async def _whole(begun: _Begun, writer: Writer, call: Call) -> bytes:
    """The answer's body, with all choices, each whole."""
    pieces: list[list[Piece]] = [[] for _ in begun.answers.answers]
    async for piece in _pieces(begun):
        pieces[piece.index].append(piece)
    num_entries = sum(1 + len(entry.top) for each in pieces for piece in each for entry in piece.logprobs)
    return await call.write(num_entries, _written, pieces, writer, begun.num_prompt_tokens)


def _written(pieces: Sequence[Sequence[Piece]], writer: Writer, num_prompt_tokens: int) -> bytes:
    choices = [joined(each) for each in pieces]
    used = usage(num_prompt_tokens, sum(len(choice.tokens) for choice in choices))
    return "".join(in_pieces(writer.whole(choices, used))).encode()
