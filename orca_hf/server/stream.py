"""Server-sent events."""

import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from orca_hf.server.answers import until_gone
from orca_hf.server.errors import as_api_error, error_body
from orca_hf.server.json_text import as_json

logger = logging.getLogger(__name__)

_LINE_ENDS = {ord(char): f"\\u{ord(char):04x}" for char in "\x85\u2028\u2029"}


class EventStream(Response):
    """An answer that is written as it comes: one event for each JSON object, then `[DONE]`.

    What fails on the way is told in an event of its own, since the status has been sent by then.

    Args:
        chunks: The objects.
        stall_timeout: Seconds to wait for a client that does not read.
        on_close: Called when the stream is over, in whatever way, begun or not; maybe twice.
    """

    media_type = "text/event-stream"

    def __init__(
        self, chunks: AsyncIterator[dict[str, Any]], stall_timeout: float, on_close: Callable[[], object]
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._chunks = chunks
        self._stall_timeout = stall_timeout
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Writes the stream, until it is over or the client goes away."""
        try:
            await until_gone(self._write(send), receive)
        except TimeoutError:
            logger.warning("A client has read nothing for %s seconds; its stream ends.", self._stall_timeout)
        finally:
            self._on_close()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for chunk in self._chunks:
                await self._send_event(send, _line(chunk))
        except OSError:
            raise  # the client is gone, or as good as that: a TimeoutError is one
        except Exception as error:
            answer = as_api_error(error)
            if answer.status_code == 500:
                logger.error("A stream failed.", exc_info=error)
            await self._send_event(send, _line(error_body(answer)))
        self._on_close()  # before the client can know: its next request may need this one's place
        await self._send_event(send, "[DONE]")
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_event(self, send: Send, data: str) -> None:
        event = {"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True}
        with anyio.fail_after(self._stall_timeout):  # before Python 3.12 asyncio.wait_for can lose a cancellation
            await send(event)


def _line(value: Any) -> str:
    """JSON that is one line to every reader: some end lines at characters that JSON does not escape."""
    return as_json(value).translate(_LINE_ENDS)
