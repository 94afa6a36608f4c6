"""The handle of a submitted request: its tokens as they come, its result, from threads and from event loops."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from typing import Any, Protocol

from torch import Tensor

from orca_hf.errors import CancelledError, OrcaError
from orca_hf.serving.logprobs import TokenLogprobs
from orca_hf.serving.stream import Stream, Timings


class Server(Protocol):
    """What a handle asks of the engine that serves it."""

    def wait(self, stream: Stream, ready: Callable[[], bool], timeout: float | None) -> bool:
        """Wait until `ready()`, driving if nobody else does; False if `timeout` seconds passed before."""

    def have_driven(self, stream: Stream) -> None:
        """See to it that a thread drives, for a reader that cannot."""


class RequestHandle:
    """One submitted request. Made by `ServingEngine.submit`.

    Any number of threads and tasks may read it, each from the first token on. Where nobody else drives the engine, a
    thread that waits for it does; a task that waits never does, and never blocks its loop. A handle that is dropped
    while its request runs cancels it, unless a streamer reads on.
    """

    def __init__(self, stream: Stream, server: Server) -> None:
        self._stream = stream
        self._server = server
        self._has_streamer = stream.streamer is not None

    def __del__(self) -> None:
        if not self._has_streamer:
            self._stream.abandon()

    @property
    def request_id(self) -> int | None:
        """Its number in `stats().recent`; None while native generate() serves it."""
        generation = self._stream.generation
        return None if generation is None else generation.requests[0].request_id

    @property
    def token_ids(self) -> list[int]:
        """The tokens so far, without the prompt."""
        return list(self._stream.tokens)

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        """Of each of `token_ids`, if asked for; of a request that runs natively, when it has ended."""
        return self._stream.logprobs[: len(self._stream.tokens)]

    @property
    def timings(self) -> Timings:
        """When it was submitted, got its first token, and ended; on a monotonic clock."""
        return self._stream.timings

    @property
    def finish_reason(self) -> str | None:
        """One of "stop", "length", "cancelled", "deadline" and "error"; None while it runs."""
        return self._stream.finish_reason

    def done(self) -> bool:
        """Whether it has ended, in whichever way."""
        return self._stream.is_done()

    def cancel(self) -> None:
        """Stop it within an iteration, if it has not ended; its slots come back."""
        self._stream.cancel(CancelledError("The request was cancelled."))

    def result(self, timeout: float | None = None) -> Tensor:
        """Wait for its end.

        Args:
            timeout: Seconds to wait; None for as long as it takes.

        Returns:
            (prompt_len + tokens,) token ids: the row that generate() returns.

        Raises:
            TimeoutError: `timeout` has passed; the request goes on.
            CancelledError: It was cancelled.
            DeadlineError: Its deadline passed.
            ForwardError: The model's forward failed.
            StoppedError: The thread that drove the engine has died.
            Exception: What generate() raises for such a call.
        """
        if not self._server.wait(self._stream, self.done, timeout):
            raise TimeoutError(f"The request has not ended within {timeout} seconds; it goes on.")
        return self._outcome()

    def __iter__(self) -> Iterator[int]:
        """Its tokens, without the prompt, as they come; then the error, if it ended with one."""
        stream, given = self._stream, 0
        while True:
            self._server.wait(stream, self._has_more_than(given), None)
            if given == len(stream.tokens):
                self._raise_error()
                return
            yield stream.tokens[given]
            given += 1

    def __await__(self) -> Generator[Any, None, Tensor]:
        """Its result, as `result()` gives it."""
        return self._result_async().__await__()

    async def __aiter__(self) -> AsyncIterator[int]:
        """Its tokens, without the prompt, as they come; then the error, if it ended with one."""
        stream, given = self._stream, 0
        while True:
            await self._wait_async(self._has_more_than(given))
            if given == len(stream.tokens):
                self._raise_error()
                return
            yield stream.tokens[given]
            given += 1

    def __repr__(self) -> str:
        state = self.finish_reason or "running"
        return f"RequestHandle({self._stream.input_ids.shape[1]} + {len(self._stream.tokens)} tokens, {state})"

    def _has_more_than(self, given: int) -> Callable[[], bool]:
        stream = self._stream
        return lambda: len(stream.tokens) > given or stream.is_done()

    async def _result_async(self) -> Tensor:
        await self._wait_async(self.done)
        return self._outcome()

    async def _wait_async(self, ready: Callable[[], bool]) -> None:
        while (future := self._stream.awaited(ready)) is not None:
            try:
                self._server.have_driven(self._stream)
                await future
            finally:
                self._stream.forget(future)

    def _outcome(self) -> Tensor:
        self._raise_error()
        return self._stream.sequence

    def _raise_error(self) -> None:
        error = self._stream.error
        if isinstance(error, OrcaError):
            # One of the reader's own: an error that is raised keeps the frames that it went through, and what they
            # hold, for as long as it is there; other handles, for instance, which then never count as dropped.
            raise copy.copy(error) from error.__cause__
        if error is not None:
            raise error.with_traceback(self._stream.traceback)
