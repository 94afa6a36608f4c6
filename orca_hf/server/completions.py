"""`/v1/completions` and `/v1/chat/completions`: start, then stream or collect."""

from collections.abc import AsyncIterator
from typing import Any

from fastapi import Request
from starlette.responses import JSONResponse, Response

from orca_hf.server.answers import Answers, Piece, until_gone
from orca_hf.server.protocol import ChatRequest, CompletionRequest, GenerationRequest, StreamOptions
from orca_hf.server.responses import ChatWriter, CompletionWriter, joined, usage
from orca_hf.server.service import Service
from orca_hf.server.stream import EventStream

_CLIENT_GONE = 499  # nobody reads it; what web servers' logs call it
Writer = CompletionWriter | ChatWriter


async def completion(service: Service, body: CompletionRequest, request: Request) -> Response:
    """Answers a completion."""
    answers, options, prompts = await service.start(body, request.scope["client_name"])
    try:
        writer = CompletionWriter(
            service.settings.model_names[0],
            service.texts,
            with_logprobs=options.logprobs is not None,
            echoes=await service.echoes(body, options, prompts),
            answers_per_prompt=options.num_answers,
        )
    except BaseException:
        answers.close()
        raise
    return await _respond(service, body, request, answers, writer, sum(map(len, prompts)))


async def chat_completion(service: Service, body: ChatRequest, request: Request) -> Response:
    """Answers a chat."""
    answers, options, prompts = await service.start(body, request.scope["client_name"])
    with_logprobs = options.logprobs is not None
    writer = ChatWriter(service.settings.model_names[0], service.texts, with_logprobs=with_logprobs)
    return await _respond(service, body, request, answers, writer, sum(map(len, prompts)))


async def _respond(
    service: Service,
    body: GenerationRequest,
    request: Request,
    answers: Answers,
    writer: Writer,
    num_prompt_tokens: int,
) -> Response:
    if body.stream:
        options = body.stream_options or StreamOptions()

        async def chunks() -> AsyncIterator[dict[str, Any]]:
            num_tokens = 0
            async for piece in answers.pieces():
                chunk = writer.chunk(piece)
                num_tokens += len(piece.tokens)
                if options.include_usage:
                    so_far = usage(num_prompt_tokens, num_tokens) if options.continuous_usage_stats else None
                    chunk = {**chunk, "usage": so_far}
                yield chunk
            if options.include_usage:
                yield writer.usage_chunk(usage(num_prompt_tokens, num_tokens))

        return EventStream(chunks(), service.settings.stall_timeout, answers.close)
    try:
        choices = await until_gone(_collect(answers), request.receive)
    finally:
        answers.close()
    if choices is None:
        return Response(status_code=_CLIENT_GONE)
    used = usage(num_prompt_tokens, sum(len(choice.tokens) for choice in choices))
    return JSONResponse(writer.whole(choices, used))


async def _collect(answers: Answers) -> list[Piece]:
    """All choices, each whole."""
    pieces: list[list[Piece]] = [[] for _ in answers.answers]
    async for piece in answers.pieces():
        pieces[piece.index].append(piece)
    return [joined(each) for each in pieces]
