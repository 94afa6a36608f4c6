"""The app: routes, and what surrounds them."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from orca_hf import __version__
from orca_hf.server.bodies import describe, takes
from orca_hf.server.completions import chat_completion, completion
from orca_hf.server.errors import ApiError, add_error_handlers, as_api_error, error_response, shutting_down
from orca_hf.server.limits import Guard
from orca_hf.server.metrics import Metrics
from orca_hf.server.page import StatusPage, as_json
from orca_hf.server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from orca_hf.server.service import Service
from orca_hf.server.settings import ServerSettings
from orca_hf.server.tokenizing import detokenize, tokenize
from orca_hf.server.warm_up import WarmUp, ended
from orca_hf.serving import ServingEngine

logger = logging.getLogger(__name__)


def make_app(
    engine: ServingEngine,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: ServerSettings,
    *,
    warm_up: Callable[[str], object] | None = None,
) -> FastAPI:
    """The ASGI app of one engine, which it drives from its start to its end.

    Args:
        engine: Of `orca_hf.engine`.
        model: The engine's.
        tokenizer: The model's.
        settings: The operator's.
        warm_up: Takes the lines that tell of a warm-up, after which the server is ready; None for none.

    Returns:
        The app; its `state.service` is what answers requests.
    """
    service = Service(engine, model, tokenizer, settings)
    warming = WarmUp(service, warm_up)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        # Nothing else than requests is in this process, which write no weights.
        with engine.serving(weights_are_fixed=True):
            task = asyncio.create_task(warming.run())
            yield
            service.stop_running()
            await ended(task)
        service.close()

    # The interactive pages would load scripts from elsewhere.
    app = FastAPI(title="orca-hf", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.router.redirect_slashes = False  # to a name that the client says, in its Host header
    app.state.service = service
    add_error_handlers(app)
    _add_openai_routes(app, service)
    _add_tokenizer_routes(app, service)
    _add_operator_routes(app, service, warming)
    describe(app, [CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest])
    app.add_middleware(Guard, api_keys=settings.api_keys, hosts=settings.hosts, max_body_bytes=settings.max_body_bytes)
    app.add_middleware(_Outermost, service=service)
    return app


def _add_openai_routes(app: FastAPI, service: Service) -> None:
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

    @app.post("/v1/completions", response_model=None, openapi_extra=takes(CompletionRequest))
    async def completions(request: Request) -> Response:
        return await completion(service, request)

    @app.post("/v1/chat/completions", response_model=None, openapi_extra=takes(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        return await chat_completion(service, request)


def _add_tokenizer_routes(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize", response_model=None, openapi_extra=takes(TokenizeRequest))
    async def tokens_of_text(request: Request) -> Response:
        return await tokenize(service, request)

    @app.post("/detokenize", response_model=None, openapi_extra=takes(DetokenizeRequest))
    async def text_of_tokens(request: Request) -> Response:
        return await detokenize(service, request)


def _add_operator_routes(app: FastAPI, service: Service, warming: WarmUp) -> None:
    @app.get("/health")
    async def health() -> dict[str, str]:
        if not service.engine.is_healthy():
            raise ApiError(503, "The engine has died; its log says why.", code="unhealthy")
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> dict[str, str]:
        if service.limits.closing or not service.engine.is_healthy():
            raise ApiError(503, "The server takes no requests.", code="not_ready")
        if warming.state != "over":
            words = "is warming up" if warming.state == "running" else "could not warm up; its log says why"
            raise ApiError(503, f"The server {words}.", code="not_ready", headers={"Retry-After": "1"})
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
    """Counts responses, answers what failed in an unforeseen way, and HEAD as GET: its body the server leaves out.

    Left to the server, a failure would end the connection, under the feet of a client's next request.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        inner = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
        has_begun = False

        async def counted(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                # Unknown routes together: a client must not be able to make up labels.
                route = getattr(inner.get("route"), "path", "other")
                self._service.metrics.answered(route, message["status"])
                kind = Headers(raw=message["headers"]).get("content-type", "")
                scope["is_event_stream"] = kind.startswith("text/event-stream")  # for the connection
            await send(message)

        try:
            await self._app(inner, receive, counted)
        except ClientDisconnect:
            return  # there is nobody to tell
        except asyncio.CancelledError:
            if has_begun or not self._service.limits.closing:
                raise
            # The server ends the tasks that outlast its grace; what they prepared nobody will run.
            await error_response(shutting_down())(scope, receive, counted)
        except Exception as error:
            if has_begun:
                raise
            answer = as_api_error(error)
            if answer.status_code == 500:
                logger.exception("A request failed.")
            await error_response(answer)(scope, receive, counted)
