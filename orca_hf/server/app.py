"""The app: routes, and what surrounds them."""

import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from orca_hf import __version__
from orca_hf.server.completions import chat_completion, completion
from orca_hf.server.errors import ApiError, add_error_handlers, as_api_error, bad_request, error_response
from orca_hf.server.extra_fields import ExtraFields
from orca_hf.server.limits import Guard
from orca_hf.server.metrics import Metrics
from orca_hf.server.page import StatusPage, as_json
from orca_hf.server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from orca_hf.server.service import Service
from orca_hf.server.settings import ServerSettings
from orca_hf.server.text import decode
from orca_hf.serving import ServingEngine

logger = logging.getLogger(__name__)


def make_app(
    engine: ServingEngine, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: ServerSettings
) -> FastAPI:
    """The ASGI app of one engine, which it drives from its start to its end.

    Args:
        engine: Of `orca_hf.engine`.
        model: The engine's.
        tokenizer: The model's.
        settings: The operator's.

    Returns:
        The app; its `state.service` is what answers requests.
    """
    service = Service(engine, model, tokenizer, settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        with engine.serving():
            yield
            service.stop_running()
        service.close()

    # The interactive pages would load scripts from elsewhere.
    app = FastAPI(title="orca-hf", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service = service
    extras = ExtraFields(strict=settings.strict)
    add_error_handlers(app)
    _add_openai_routes(app, service, extras)
    _add_tokenizer_routes(app, service, extras)
    _add_operator_routes(app, service)
    app.add_middleware(Guard, api_keys=settings.api_keys, hosts=settings.hosts, max_body_bytes=settings.max_body_bytes)
    app.add_middleware(_Outermost, metrics=service.metrics)
    return app


def _add_openai_routes(app: FastAPI, service: Service, extras: ExtraFields) -> None:
    created = int(time.time())

    def card(name: str) -> dict[str, Any]:
        about = {"id": name, "object": "model", "created": created, "owned_by": "orca-hf"}
        return {**about, "max_model_len": service.settings.max_model_len}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card(name) for name in service.settings.model_names]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return card(name)

    @app.post("/v1/completions", response_model=None)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        extras.check(body)
        return await completion(service, body, request)

    @app.post("/v1/chat/completions", response_model=None)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        extras.check(body)
        return await chat_completion(service, body, request)


def _add_tokenizer_routes(app: FastAPI, service: Service, extras: ExtraFields) -> None:
    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        extras.check(body)
        service.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise bad_request("Give either prompt or messages.", "prompt")
        if body.messages is not None:
            tokens = await service.prepare(service.prompts.of_chat, body.messages)
        else:
            tokens = await service.prepare(
                lambda: service.prompts.of_text(body.prompt or "", add_special_tokens=body.add_special_tokens)
            )
        return {"count": len(tokens), "max_model_len": service.settings.max_model_len, "tokens": tokens}

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, Any]:
        extras.check(body)
        service.check_model(body.model)
        return {"prompt": await service.prepare(decode, service.tokenizer, body.tokens)}


def _add_operator_routes(app: FastAPI, service: Service) -> None:
    @app.get("/health")
    async def health() -> dict[str, str]:
        if not service.engine.is_healthy():
            raise ApiError(503, "The engine has died; its log says why.", code="unhealthy")
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> dict[str, str]:
        if service.limits.closing or not service.engine.is_healthy():
            raise ApiError(503, "The server takes no requests.", code="not_ready")
        return {"status": "ready"}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type=Metrics.content_type)

    @app.get("/status.json")
    async def status(after: int = 0) -> JSONResponse:
        about = {"model": service.settings.model_names[0], "version": __version__, "open": service.limits.num_open}
        return JSONResponse({**about, **as_json(service.engine.stats(), after)})

    page = StatusPage()

    @app.get("/", include_in_schema=False)
    async def status_in_a_browser() -> Response:
        return page.response()


class _Outermost:
    """Counts responses, and answers what failed in an unforeseen way.

    Left to the server, that would end the connection, under the feet of a client's next request.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def counted(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                # Unknown routes together: a client must not be able to make up labels.
                route = getattr(scope.get("route"), "path", "other")
                self._metrics.answered(route, message["status"])
            await send(message)

        try:
            await self._app(scope, receive, counted)
        except Exception as error:
            if has_begun or scope["type"] != "http":
                raise
            answer = as_api_error(error)
            if answer.status_code == 500:
                logger.exception("A request failed.")
            await error_response(answer)(scope, receive, counted)
