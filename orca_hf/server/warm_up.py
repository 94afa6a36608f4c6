"""A server's first requests, which are its own: the first of all compiles kernels, packs weights, and takes long."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

from orca_hf.server.errors import ApiError
from orca_hf.server.protocol import ChatRequest, CompletionRequest, GenerationRequest
from orca_hf.server.service import Service

logger = logging.getLogger(__name__)

# Weights are packed, and the kernels for that compiled, for answers of some length only.
_PLAIN: dict[str, Any] = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}
_SAMPLED: dict[str, Any] = {**_PLAIN, "temperature": 1, "top_p": 0.9, "seed": 0, "presence_penalty": 1}
_STRUCTURED: dict[str, Any] = {"max_tokens": 2, "temperature": 0, "response_format": {"type": "json_object"}}


class WarmUp:
    """Asks for a few tokens by every way that requests take. Requests that come meanwhile are served along.

    Args:
        service: Which is asked.
        write: Takes the lines that tell of it; None for no warm-up.
    """

    def __init__(self, service: Service, write: Callable[[str], object] | None) -> None:
        self._service = service
        self._write = write
        self.state = "over" if write is None else "running"

    async def run(self) -> None:
        """Warms up, once."""
        if self._write is None:
            return
        start = time.monotonic()
        self._write("Warming up ...")
        try:
            for request in self._requests():
                await self._ask(request)
        except Exception:
            self.state = "failed"
            logger.exception("The server is not ready, since its warm-up failed.")
        else:
            self.state = "over"
            self._write(f"Ready: warmed up in {time.monotonic() - start:.1f} s")

    def _requests(self) -> Iterator[GenerationRequest]:
        ways = [_PLAIN, {**_SAMPLED, "logprobs": True}, *([_STRUCTURED] if find_spec("llguidance") else [])]
        for options in ways:
            if self._service.tokenizer.chat_template:
                given: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], **options}
                yield ChatRequest.model_validate(given)
            else:
                yield CompletionRequest.model_validate({"prompt": "Hello", **options})

    async def _ask(self, request: GenerationRequest) -> None:
        try:
            answers, *_ = await self._service.start(request, self._service.admit("warm-up"))
        except ApiError as error:
            if error.status_code >= 500:
                raise
            # A template that wants other messages, say. That is no fault of the server's.
            logger.warning("A request of the warm-up was refused: %s", error.detail)
            return
        try:
            async for _ in answers.pieces():
                pass
        finally:
            answers.close()


async def ended(task: asyncio.Task[None]) -> None:
    """Cancels a task and waits for its end."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
