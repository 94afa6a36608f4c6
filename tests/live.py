"""A live server in a thread, and an engine whose every token the test decides."""

import asyncio
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from openai import OpenAI
from tiny import make_model

from orca_hf.server.app import make_app
from orca_hf.server.command import Server, bind
from orca_hf.server.settings import ServerSettings

PATIENCE = 30  # seconds after which a test that waits has failed


@dataclass
class Live:
    """One server that runs: where it is, and clients of it."""

    url: str
    server: Server
    thread: threading.Thread
    key: str | None = None

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.key is None else {"Authorization": f"Bearer {self.key}"}

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)

    @property
    def service(self) -> Any:
        return self.server.service

    def openai(self, **options: Any) -> OpenAI:
        key = self.key or "none"
        given = {"base_url": f"{self.url}/v1", "api_key": key, "max_retries": 0, "timeout": PATIENCE}
        return OpenAI(**{**given, **options})

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers=self.headers, timeout=PATIENCE)

    def stop(self) -> None:
        """Tells it to stop, as a signal does."""
        self.server.should_exit = True

    def wait_until_closed(self) -> None:
        """Wait until it takes no connections any more."""
        limit = time.monotonic() + PATIENCE
        with pytest.raises(ConnectionRefusedError):
            while time.monotonic() < limit:
                with suppress(ConnectionResetError):  # it was in the queue when the socket closed
                    socket.create_connection(self.address, PATIENCE).close()

    def join(self) -> None:
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()


@contextmanager
def live(
    engine: Any, model: Any, tokenizer: Any, key: str | None = None, warm_up: Any = None, **settings: Any
) -> Iterator[Live]:
    """Serves until the block ends."""
    given = {"model_names": ("tiny",), "max_model_len": 128, "api_keys": (key,) if key else (), "grace": 0.0}
    made = ServerSettings(**{**given, **settings})
    server = Server(make_app(engine, model, tokenizer, made, warm_up=warm_up), made, log_level="critical")
    listener = bind("127.0.0.1", 0)
    listener.listen()  # whoever comes before it accepts waits in the kernel
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    running = Live(f"http://127.0.0.1:{listener.getsockname()[1]}", server, thread, key)
    try:
        yield running
    finally:
        running.stop()
        running.join()


def wait_until_ready(running: Live) -> httpx.Response:
    """Its first answer to /ready that is no 503."""
    limit = time.monotonic() + PATIENCE
    while (answer := httpx.get(f"{running.url}/ready")).status_code == 503 and time.monotonic() < limit:
        assert answer.headers["retry-after"] == "1"
    return answer


@contextmanager
def faked(engine: "FakeEngine", tokenizer: Any, **settings: Any) -> Iterator[Live]:
    """A server on a fake engine."""
    with live(engine, make_model(), tokenizer, **settings) as running:
        yield running


@dataclass
class FakeHandle:
    """A request of the fake engine; the test says its tokens."""

    given: dict[str, Any]
    loop: asyncio.AbstractEventLoop
    tokens: asyncio.Queue = field(default_factory=asyncio.Queue)
    cancelled: threading.Event = field(default_factory=threading.Event)
    finish_reason: str | None = None
    logprobs: tuple = ()
    timings: Any = field(default_factory=lambda: SimpleNamespace(arrival=1.0, first_token=None, end=None))

    def say(self, *tokens: int) -> None:
        for token in tokens:
            self.loop.call_soon_threadsafe(self.tokens.put_nowait, token)

    def end(self, reason: str = "length") -> None:
        self.finish_reason = reason
        self.loop.call_soon_threadsafe(self.tokens.put_nowait, None)

    def fail(self, error: BaseException) -> None:
        self.loop.call_soon_threadsafe(self.tokens.put_nowait, error)

    def cancel(self) -> None:
        self.cancelled.set()

    async def __aiter__(self) -> Any:
        while (token := await self.tokens.get()) is not None:
            if isinstance(token, BaseException):
                raise token
            yield token


class FakeEngine:
    """What the server uses of an engine. `script` answers at once; without one, `handles` are the test's to answer."""

    def __init__(self, script: Sequence[int] | None = None) -> None:
        self.script = script
        self.handles: list[FakeHandle] = []
        self.submitted = threading.Condition()
        self.healthy = True

    def submit(self, prompt: list[int], **given: Any) -> FakeHandle:
        handle = FakeHandle({"prompt": prompt, **given}, self.loop)
        if self.script is not None:
            handle.say(*self.script[: given["max_new_tokens"]])
            handle.end()
        with self.submitted:
            self.handles.append(handle)
            self.submitted.notify_all()
        return handle

    def wait_for(self, count: int) -> list[FakeHandle]:
        """The first `count` requests, when they are there."""
        with self.submitted:
            assert self.submitted.wait_for(lambda: len(self.handles) >= count, PATIENCE)
            return self.handles[:count]

    def stats(self) -> Any:
        raise NotImplementedError

    def is_healthy(self) -> bool:
        return self.healthy

    @contextmanager
    def serving(self, *, weights_are_fixed: bool) -> Iterator[None]:
        self.loop = asyncio.get_running_loop()
        yield
