"""Who may ask, how much, and how many at once."""

import hashlib
import hmac
from collections import Counter
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orca_hf.server.errors import ApiError, error_response, shutting_down
from orca_hf.server.keys import check_api_keys

# For whoever watches over the process, and has no key; and the page that asks for one, and holds nothing.
_OPEN_PATHS = ("/health", "/ready", "/")
_LATER = {"Retry-After": "1"}


class Ticket:
    """The right to a number of answers at once, until it is given back."""

    def __init__(self, limits: "Limits", client: str, num_answers: int) -> None:
        self._limits = limits
        self.client = client
        self.num_answers = num_answers

    def widen(self, num_answers: int) -> None:
        """Makes it one for so many answers, now that it is known how many the request wants.

        Raises:
            ApiError: As for `Limits.admit`.
        """
        self._limits._widen(self, num_answers)

    def give_back(self) -> None:
        """May be called twice."""
        self._limits._take_back(self)


class Limits:
    """Counts what is open, and refuses what is too much. Used on the event loop only.

    Args:
        max_open: Answers at once, of all clients.
        max_per_client: Requests at once of one key, or of one address where there are no keys.
    """

    def __init__(self, max_open: int, max_per_client: int) -> None:
        self.max_open = max_open
        self.max_per_client = max_per_client
        self.num_open = 0
        self.closing = False
        self._tickets: set[Ticket] = set()
        self._by_client: Counter[str] = Counter()

    def admit(self, client: str, num_answers: int) -> Ticket:
        """A ticket for a request that wants `num_answers`.

        Raises:
            ApiError: It is too much at once, now or ever, or the server is shutting down.
        """
        if self.closing:
            raise shutting_down()
        if self._by_client[client] >= self.max_per_client:
            message = f"You have {self.max_per_client} requests open, which is the limit. Wait for one to end."
            raise ApiError(429, message, code="rate_limit_exceeded", headers=_LATER)
        self._refuse_if_full(num_answers, num_answers)
        ticket = Ticket(self, client, num_answers)
        self._tickets.add(ticket)
        self._by_client[client] += 1
        self.num_open += num_answers
        return ticket

    def _widen(self, ticket: Ticket, num_answers: int) -> None:
        num_more = num_answers - ticket.num_answers
        self._refuse_if_full(num_answers, num_more)
        ticket.num_answers = num_answers
        self.num_open += num_more

    def _refuse_if_full(self, num_answers: int, num_more: int) -> None:
        if num_answers > self.max_open:
            raise ApiError(400, f"The request wants {num_answers} answers, the server gives {self.max_open} at once.")
        if self.num_open + num_more > self.max_open:
            message = f"The queue is full: {self.num_open} of {self.max_open} answers are open. Try again later."
            raise ApiError(429, message, code="queue_full", headers=_LATER)

    def _take_back(self, ticket: Ticket) -> None:
        if ticket in self._tickets:
            self._tickets.remove(ticket)
            self.num_open -= ticket.num_answers
            self._by_client[ticket.client] -= 1
            if not self._by_client[ticket.client]:
                del self._by_client[ticket.client]


class Guard:
    """The outermost layer of the app: keys, hosts and sizes, before anything of a request is read.

    Args:
        app: What it guards.
        api_keys: Of which a request has to have one; none if there are none.
        hosts: Names that the server answers to; all if None. Without a key it is what keeps web pages out, which
            can give a name of their own the address of this machine.
        max_body_bytes: Of a request.

    Raises:
        ConfigError: A key is none.
    """

    def __init__(
        self, app: ASGIApp, *, api_keys: Sequence[str], hosts: Sequence[str] | None, max_body_bytes: int
    ) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in check_api_keys(api_keys)]
        self._hosts = hosts
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Lets a request through, or answers it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            self._check(scope, headers)
        except ApiError as error:
            await error_response(error)(scope, receive, send)
            return
        await self._app(scope, self._bounded(receive), send)

    def _check(self, scope: Scope, headers: Headers) -> None:
        if self._hosts is not None and _host_name(headers.get("host", "").lower()) not in self._hosts:
            raise ApiError(421, f"This server answers to {', '.join(self._hosts)}.", code="wrong_host")
        scope["client_name"] = (scope.get("client") or ("unknown",))[0]
        if self._digests and scope["path"] not in _OPEN_PATHS:
            scheme, _, key = headers.get("authorization", "").partition(" ")
            # The bytes that were sent, without HTTP's white space; str.strip() would take parts of characters too.
            digest = _digest(key.strip(" \t").encode("latin-1"))
            # Every key is compared, each in constant time: how long it takes says nothing about any.
            fits = [hmac.compare_digest(digest, own) for own in self._digests]
            if scheme.lower() != "bearer" or not any(fits):
                message = "The API key is missing or wrong. Send it as 'Authorization: Bearer KEY'."
                challenge = {"WWW-Authenticate": "Bearer"}
                raise ApiError(401, message, code="invalid_api_key", headers=challenge)
            scope["client_name"] = f"key {fits.index(True)}"
        if scope["method"] == "POST":
            _check_type(scope, headers)
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length[:20]) > self._max_body_bytes:
            raise self._too_large()

    def _bounded(self, receive: Receive) -> Receive:
        seen = 0

        async def bounded() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._max_body_bytes:
                raise self._too_large()
            return message

        return bounded

    def _too_large(self) -> ApiError:
        return ApiError(413, f"The body is larger than {self._max_body_bytes} bytes.", code="body_too_large")


def _check_type(scope: Scope, headers: Headers) -> None:
    """JSON is what a body without a type is taken for, but not from a browser.

    There a page of anybody's may send a body of no type, of text or of a form to any address without asking, and only
    application/json makes the browser ask first.

    Raises:
        ApiError: The body is of another type.
    """
    given = headers.get("content-type")
    if given is None and "origin" not in headers and "sec-fetch-site" not in headers:
        scope["headers"] = [*scope["headers"], (b"content-type", b"application/json")]
        return
    kind = (given or "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        said = "no type" if given is None else f"the type {kind[:64]!r}"
        raise ApiError(400, f"The body has {said}. Send JSON, with the header 'Content-Type: application/json'.")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _host_name(host: str) -> str:
    """A Host header without its port."""
    return host.partition("]")[0].removeprefix("[") if host.startswith("[") else host.partition(":")[0]
