"""HTTP/1.1 as uvicorn speaks it, with what it leaves to a proxy: patience that ends, and errors in OpenAI's form."""

import asyncio
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from orca_hf.server.errors import ApiError, error_response

# Seconds after which a client that has closed its sending side is written to: twice at once, since the first write to
# one that is gone is answered by its machine, which the second then finds, and after that rarely.
_FIRST_PROBE, _NEXT_PROBES = 0.2, 5.0


class HttpConfig(uvicorn.Config):
    """uvicorn's configuration, and what all connections of a server share.

    Args:
        app: Of `make_app`.
        max_connections: At once. The one that has waited longest for its client makes room for a new one, so that
            clients who connect and say nothing keep nobody out.
        client_timeout: Seconds for a request's head, and for each piece of its body.
        **given: uvicorn's.
    """

    def __init__(self, app: FastAPI, *, max_connections: int, client_timeout: float, **given: Any) -> None:
        super().__init__(app, http=Http, ws="none", server_header=False, **given)
        self.max_connections = max_connections
        self.client_timeout = client_timeout
        self.waiting: dict[Http, None] = {}  # connections that wait for their clients, longest first


class Http(H11Protocol):
    """One connection."""

    config: HttpConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._patience: asyncio.TimerHandle | None = None
        self._probing: asyncio.TimerHandle | None = None
        self._is_half_closed = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Called by asyncio, once."""
        super().connection_made(transport)
        if len(self.connections) > self.config.max_connections:
            if not self.config.waiting:
                message = f"There are {self.config.max_connections} connections, which is the limit. Try again later."
                self._refuse(ApiError(503, message, code="too_many_connections", headers={"Retry-After": "1"}))
                return
            next(iter(self.config.waiting))._give_up("others wait for a connection")
        self.config.waiting[self] = None
        self._be_patient()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio, once."""
        self._stop_waiting()
        self._stop_probing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Called by asyncio. A head has a time for all of it, however slowly its bytes come; a body for each piece."""
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._is_being_served():
            self._stop_waiting()
        elif self._patience is None or (self.cycle is not None and not self.cycle.response_complete):
            self._be_patient()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Called by asyncio when the client will send no more, which it may do and wait for its answer.

        Returns:
            Whether the connection stays open for that.
        """
        if not self._is_being_served():
            return False
        # Who is gone altogether looks the same. So it is written to: HTTP lets a server say "100 Continue" at any time
        # before an answer, and an event stream has comments.
        self._is_half_closed = True
        self._probe(_FIRST_PROBE)
        return True

    def on_response_complete(self) -> None:
        """Called at the end of a response; the next request may have been there already."""
        super().on_response_complete()
        self._stop_probing()
        if self.transport.is_closing() or self._is_being_served():
            return
        if self._is_half_closed:
            self.transport.close()
            return
        self.config.waiting[self] = None  # uvicorn's own timeout, for connections kept alive, ends it

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn for what is no HTTP."""
        self._refuse(ApiError(400, "What was sent is not a valid HTTP/1.1 request."))

    def _is_being_served(self) -> bool:
        """Whether a request has come as a whole, and its answer is not over."""
        return self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body

    def _be_patient(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
        what = f"no more of the request came within {self.config.client_timeout:g} seconds"
        self._patience = self.loop.call_later(self.config.client_timeout, self._give_up, what)

    def _stop_waiting(self) -> None:
        self.config.waiting.pop(self, None)
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _give_up(self, reason: str) -> None:
        self._stop_waiting()
        self._refuse(ApiError(408, f"The connection is closed: {reason}.", code="request_timeout"))

    def _refuse(self, error: ApiError) -> None:
        """Answers, if nothing has been answered yet, and closes."""
        self._stop_waiting()
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # for the app, which may be reading the body
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            answer = error_response(error)
            headers = [*answer.raw_headers, (b"connection", b"close")]
            for event in (
                h11.Response(status_code=answer.status_code, headers=headers),
                h11.Data(data=bytes(answer.body)),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.connections.discard(self)
        self.transport.close()

    def _probe(self, next_after: float) -> None:
        self._probing = None
        if self.transport.is_closing() or not self._is_being_served():
            return
        if not self.cycle.response_started:
            if self.scope["http_version"] == "1.1":
                continues = h11.InformationalResponse(status_code=100, headers=[], reason="Continue")
                self.transport.write(self.conn.send(continues) or b"")
        elif self.scope.get("is_event_stream"):
            self.transport.write(self.conn.send(h11.Data(data=b":\n\n")) or b"")
        self._probing = self.loop.call_later(next_after, self._probe, _NEXT_PROBES)

    def _stop_probing(self) -> None:
        if self._probing is not None:
            self._probing.cancel()
            self._probing = None
