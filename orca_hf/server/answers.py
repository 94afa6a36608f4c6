"""The answers to one request while they are being made: tokens of several handles to pieces of text, in one stream."""

import asyncio
import time
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from orca_hf.server.logprobs import Logprob, as_logprob
from orca_hf.server.text import Decoder, Detokenizer, StopStrings
from orca_hf.serving import RequestHandle


@dataclass(frozen=True, slots=True)
class Piece:
    """What is new in one of the answers.

    Attributes:
        index: Which answer.
        text: Whole characters, and none of a stop string.
        tokens: Those that begin in this text; with the last piece all that are left.
        logprobs: Theirs, if the request wants any.
        finish_reason: "stop" or "length" with the last piece, else None.
    """

    index: int
    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[Logprob, ...] = ()
    finish_reason: str | None = None


@dataclass(slots=True)
class Answer:
    """One answer: where its tokens come from, and its place in the request.

    Attributes:
        index: Its place.
        prompt: The tokens before it.
        handle: The engine's; None for an answer of no tokens.
        begins_at: Characters before it in its choice's text, which are its prompt's.
        num_tokens: Tokens so far.
        ended: When its last piece was made, on the monotonic clock; None before, and if it was given up.
    """

    index: int
    prompt: Sequence[int]
    handle: RequestHandle | None
    begins_at: int = field(default=0, init=False)
    num_tokens: int = field(default=0, init=False)
    ended: float | None = field(default=None, init=False)


class Answers:
    """All answers to one request. Whoever made it calls `close`, which ends whatever of it still runs.

    Args:
        answers: In order.
        decoder: Of the model's tokens.
        stops: Strings that end an answer.
        with_logprobs: Whether pieces carry log-probabilities.
        on_close: Called once, at the end.
    """

    def __init__(
        self,
        answers: Sequence[Answer],
        decoder: Decoder,
        *,
        stops: Sequence[str],
        with_logprobs: bool,
        on_close: Callable[["Answers"], object],
    ) -> None:
        self.answers = answers
        self._decoder = decoder
        self._stops = stops
        self._with_logprobs = with_logprobs
        self._on_close = on_close
        self._tasks: list[asyncio.Task[None]] = []
        self._closed = False
        # Unbounded, so that a client who does not read stops nobody: it holds no more than the answers have tokens.
        self._pieces: asyncio.Queue[Piece | BaseException] = asyncio.Queue()

    async def pieces(self) -> AsyncIterator[Piece]:
        """What comes, of all answers, as it comes.

        Raises:
            Exception: Whatever ended one of them; the others end with it.
        """
        self._tasks = [asyncio.create_task(self._follow(answer)) for answer in self.answers]
        unfinished = len(self.answers)
        while unfinished:
            piece = await self._pieces.get()
            if isinstance(piece, BaseException):
                raise piece
            unfinished -= piece.finish_reason is not None
            yield piece

    def fail(self, error: BaseException) -> None:
        """End the request with `error`, for whoever reads its pieces."""
        self._pieces.put_nowait(error)
        self._stop()

    def close(self) -> None:
        """Cancel what is unfinished; may be called twice."""
        self._stop()
        if not self._closed:
            self._closed = True
            self._on_close(self)

    def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        for answer in self.answers:
            if answer.handle is not None:
                answer.handle.cancel()

    async def _follow(self, answer: Answer) -> None:
        try:
            if answer.handle is None:
                self._pieces.put_nowait(Piece(answer.index, "", (), finish_reason="length"))
                return
            reader = _Reader(answer, answer.handle, self._decoder, self._stops, with_logprobs=self._with_logprobs)
            async for piece in reader.pieces():
                self._pieces.put_nowait(piece)
        except Exception as error:  # noqa: BLE001 - goes to the reader, whoever that is
            self._pieces.put_nowait(error)


class _Reader:
    """Reads one answer's handle."""

    def __init__(
        self,
        answer: Answer,
        handle: RequestHandle,
        decoder: Decoder,
        stops: Sequence[str],
        *,
        with_logprobs: bool,
    ) -> None:
        self._answer = answer
        self._handle = handle
        self._detokenizer = Detokenizer(decoder, answer.prompt)
        self._stops = StopStrings(stops)
        self._with_logprobs = with_logprobs
        self._text = ""  # since the last piece
        self._tokens: list[int] = []  # that have not been in a piece
        self._num_given = 0  # tokens that have
        self._num_shown = 0  # characters that have

    async def pieces(self) -> AsyncIterator[Piece]:
        over = False
        async for token in self._handle:
            await asyncio.sleep(0)  # tokens that are there already must not keep the loop from other requests
            if over:
                continue  # read on for log-probabilities, which come at the end of what runs natively
            self._answer.num_tokens += 1
            self._tokens.append(token)
            self._text += self._stops.push(self._detokenizer.push(token))
            over = self._stops.found
            if over and self._has_logprobs():
                self._handle.cancel()
                break
            if self._text and not over and self._has_logprobs():
                yield self._take()
        if not over:
            self._text += self._stops.push(self._detokenizer.flush()) + self._stops.flush()
        self._answer.ended = time.monotonic()
        yield self._take("stop" if self._stops.found else self._handle.finish_reason)

    def _has_logprobs(self) -> bool:
        return not self._with_logprobs or len(self._handle.logprobs) >= self._num_given + len(self._tokens)

    def _take(self, finish_reason: str | None = None) -> Piece:
        self._num_shown += len(self._text)
        begins = self._detokenizer.begins[self._num_given :]
        # The tokens of text that is held back wait for it: should a stop string take it away, they begin at its place.
        # And so do those that begin a character.
        count = bisect_left(begins, self._num_shown) if self._stops.holds else len(begins)
        if finish_reason is not None:
            count = len(self._tokens)
        tokens, self._tokens = self._tokens[:count], self._tokens[count:]
        entries = self._handle.logprobs[self._num_given : self._num_given + count] if self._with_logprobs else ()
        logprobs = tuple(
            as_logprob(token, entry, self._answer.begins_at + min(begin, self._num_shown))
            for token, entry, begin in zip(tokens, entries, begins, strict=False)
        )
        piece = Piece(self._answer.index, self._text, tuple(tokens), logprobs, finish_reason)
        self._text = ""
        self._num_given += count
        return piece


async def until_gone(work: Any, receive: Callable[[], Any]) -> Any:
    """The result of the coroutine `work`, or None if the client went away before it was there.

    Args:
        work: Cancelled when the client goes.
        receive: The request's ASGI channel, its body already read.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _gone(receive: Callable[[], Any]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
