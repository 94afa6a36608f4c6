"""The answers to one request while they are being made: tokens of several handles to pieces of text, in one stream."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from orca_hf.server.logprobs import Logprob, as_logprob
from orca_hf.server.text import Detokenizer, StopStrings


@dataclass(frozen=True, slots=True)
class Piece:
    """What is new in one of the answers.

    Attributes:
        index: Which answer.
        text: Whole characters, and none of a stop string.
        tokens: The tokens that came since the last piece; those of text that is held back included.
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
        num_tokens: Tokens so far.
    """

    index: int
    prompt: Sequence[int]
    handle: Any
    num_tokens: int = field(default=0, init=False)


class Answers:
    """All answers to one request. Whoever made it calls `close`, which ends whatever of it still runs.

    Args:
        answers: In order.
        tokenizer: The model's.
        stops: Strings that end an answer.
        with_logprobs: Whether pieces carry log-probabilities.
        on_close: Called once, at the end.
    """

    def __init__(
        self,
        answers: Sequence[Answer],
        tokenizer: PreTrainedTokenizerBase,
        *,
        stops: Sequence[str],
        with_logprobs: bool,
        on_close: Callable[["Answers"], object],
    ) -> None:
        self.answers = answers
        self._tokenizer = tokenizer
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
            async for piece in self._read(answer):
                self._pieces.put_nowait(piece)
        except Exception as error:  # noqa: BLE001 - goes to the reader, whoever that is
            self._pieces.put_nowait(error)

    async def _read(self, answer: Answer) -> AsyncIterator[Piece]:
        if answer.handle is None:
            yield Piece(answer.index, "", (), finish_reason="length")
            return
        detokenizer = Detokenizer(self._tokenizer, answer.prompt)
        stops = StopStrings(self._stops)
        tokens: list[int] = []
        num_given = 0

        def piece(text: str, finish_reason: str | None = None) -> Piece:
            nonlocal num_given
            logprobs = self._logprobs(answer.handle, tokens, num_given)
            made = Piece(answer.index, text, tuple(tokens), logprobs, finish_reason)
            num_given += len(tokens)
            tokens.clear()
            return made

        async for token in answer.handle:
            tokens.append(token)
            answer.num_tokens += 1
            text = stops.push(detokenizer.push(token))
            if stops.found:
                answer.handle.cancel()
                yield piece(text, "stop")
                return
            if text:
                yield piece(text)
        text = stops.push(detokenizer.flush()) + stops.flush()
        yield piece(text, "stop" if stops.found else answer.handle.finish_reason)


    def _logprobs(self, handle: Any, tokens: Sequence[int], start: int) -> tuple[Logprob, ...]:
        if not self._with_logprobs:
            return ()
        entries = handle.logprobs[start : start + len(tokens)]
        return tuple(as_logprob(token, entry) for token, entry in zip(tokens, entries, strict=True))


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
