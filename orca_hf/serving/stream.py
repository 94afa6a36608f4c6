"""What a handle reads and the engine writes: one request's tokens as they come, and how it ended."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from torch import Tensor
from transformers import StoppingCriteriaList
from transformers.generation import EosTokenCriteria, StopStringCriteria

from orca_hf.errors import CancelledError, DeadlineError, UnsupportedError
from orca_hf.interruption import let_go
from orca_hf.prepared_call import max_length_of
from orca_hf.serving.logprobs import TokenLogprobs, token_logprobs

if TYPE_CHECKING:
    from orca_hf.engines import Engine
    from orca_hf.interruption import Lock
    from orca_hf.sampling import Generation, Streamer


@dataclass(frozen=True, slots=True)
class Timings:
    """When things happened to a request, on a monotonic clock, in seconds; None for what has not.

    Attributes:
        arrival: It was submitted.
        first_token: Its first token came.
        end: It ended, in whichever way.
    """

    arrival: float
    first_token: float | None
    end: float | None


class Stream:
    """One submitted request, by Orca or natively. Holds no reference to its handle, whose end it is told of.

    Args:
        input_ids: (1, prompt_len).
        num_logprobs: How many alternatives to note with each token's log-probability; None for no log-probabilities.
        streamer: The user's, or None.
        deadline: When to give up, on the clock, or None.
        clock: Seconds that never go back.
        on_end: Called once, with the stream, when the request has ended; must be quick.
        locks: Those that `on_end` takes.

    Attributes:
        engine: Who serves it; None while native generate() does.
        generation: The request as `engine` knows it.
        criteria: What ends its row, where that is known.
        fall_back: Hands it over to native generate(), for the given reason.
        abandoned: Nobody will read it.
    """

    def __init__(
        self,
        input_ids: Tensor,
        *,
        num_logprobs: int | None,
        streamer: Streamer | None,
        deadline: float | None,
        clock: Callable[[], float],
        on_end: Callable[[Stream], None],
        locks: Sequence[Lock] = (),
    ) -> None:
        self.input_ids = input_ids
        self.num_logprobs = num_logprobs
        self.wants_logits = num_logprobs is not None
        self.deadline = deadline
        self.engine: Engine | None = None
        self.generation: Generation | None = None
        self.criteria: StoppingCriteriaList | None = None
        self.fall_back: Callable[[str], None] | None = None
        self.abandoned = False
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.error: BaseException | None = None
        self.traceback: TracebackType | None = None  # of the error, as it came
        self.streamer = streamer
        self._clock = clock
        self._on_end = on_end
        self._done = False
        self._is_told = False  # its owner knows that it has ended
        self._cancelled: BaseException | None = None
        self._sequence: Tensor | None = None
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)
        self._locks = locks
        self._readers: dict[asyncio.Future[None], asyncio.AbstractEventLoop] = {}
        self._arrival = clock()
        self._first_token: float | None = None
        self._end: float | None = None

    def is_done(self) -> bool:
        """Whether it has ended, in whichever way."""
        return self._done

    @property
    def timings(self) -> Timings:
        """When it came, began to answer and ended."""
        return Timings(self._arrival, self._first_token, self._end)

    @property
    def sequence(self) -> Tensor:
        """(prompt_len + tokens,) as generate() returns the row; once it has ended well."""
        if self._sequence is None:
            assert self.generation is not None
            self._sequence = self.generation.sequences()[0]
        return self._sequence

    @property
    def finish_reason(self) -> str | None:
        """Why it ended, None while it has not."""
        if not self._done:
            return None
        if self.error is not None:
            kinds: dict[type[BaseException], str] = {CancelledError: "cancelled", DeadlineError: "deadline"}
            return kinds.get(type(self.error), "error")
        max_length = None if self.criteria is None else max_length_of(self.criteria)
        if self.criteria is None or max_length is None or len(self.sequence) < max_length:
            return "stop"
        # At its greatest length, and yet it may have ended by itself.
        ends = [each for each in self.criteria if type(each) in (EosTokenCriteria, StopStringCriteria)]
        return "stop" if any(bool(each(self.sequence[None], None).any()) for each in ends) else "length"

    # What the engine tells: see `sampling.Listener`.

    def weigh(self, logits: Tensor, token: int) -> None:
        """Note the log-probability of the token that comes next."""
        assert self.num_logprobs is not None
        self.logprobs += token_logprobs(logits[None], [token], self.num_logprobs)

    def catch_up(self, tokens: Sequence[int]) -> None:
        """Take what is new of all tokens so far."""
        with self.lock:
            new = tokens[len(self.tokens) :]
            if self._done or not new:
                return
            if self._first_token is None:
                self._first_token = self._clock()
            self.tokens += new
            self._notify()

    def let_go(self) -> None:
        """Release what the calling thread still holds of its locks."""
        let_go((self.lock, *self._locks))

    def ended(self) -> None:
        """The engine is done with it."""
        generation = self.generation
        if self._is_told or generation is None:
            return
        error = generation.error
        can_fall_back = not self.tokens and self._cancelled is None and self.fall_back is not None
        if isinstance(error, UnsupportedError) and can_fall_back:
            assert self.fall_back is not None
            self.generation = self.engine = None
            generation.close(discard=True)
            self.fall_back(str(error))
            return
        generation.close()
        unheard = self.end_streamer()
        self.finish(error or unheard)

    def wake(self) -> None:
        """Have readers look again."""
        with self.lock:
            self._notify()

    # What its owner tells.

    def end_streamer(self) -> BaseException | None:
        """Tell the user's streamer, once, that nothing more comes.

        Returns:
            What it raised.
        """
        streamer, self.streamer = self.streamer, None
        try:
            if streamer is not None:
                streamer.end()
        except BaseException as error:
            # The user's code, whose errors the request's readers see; but Ctrl-C comes to the main thread as well.
            if not isinstance(error, Exception) and threading.current_thread() is threading.main_thread():
                raise
            return error
        return None

    def finish(self, error: BaseException | None, sequence: Tensor | None = None) -> None:
        """End it, unless it has ended."""
        with self.lock:
            if not self._done:
                self.error = error
                self.traceback = None if error is None else error.__traceback__
                self._sequence = sequence
                self._end = self._clock()
                self._done = True
                self._notify()
            if self._is_told:
                return
            self._is_told = True
        self._on_end(self)

    def cancel(self, error: BaseException) -> None:
        """End it with `error`, unless it has ended; may be called again."""
        self._cancelled = error
        engine, generation = self.engine, self.generation
        if engine is not None and generation is not None:
            engine.cancel(generation, error)
        if self.engine is None:  # native generate() has it, perhaps since a moment ago
            self.finish(error)

    def abandon(self) -> None:
        """Nobody will read it; takes no lock."""
        self.abandoned = True
        engine, generation = self.engine, self.generation
        if engine is not None and generation is not None:
            engine.abandon(generation)

    # What readers wait for.

    def wait(self, ready: Callable[[], bool], timeout: float | None) -> None:
        """Wait until `ready()`, asked whenever something has changed, or `timeout` seconds."""
        with self.lock:
            self._changed.wait_for(ready, timeout)

    def awaited(self, ready: Callable[[], bool]) -> asyncio.Future[None] | None:
        """A future of the running loop that is set when something changes; None if `ready()` already."""
        loop = asyncio.get_running_loop()
        with self.lock:
            if ready():
                return None
            future: asyncio.Future[None] = loop.create_future()
            self._readers[future] = loop
            return future

    def forget(self, future: asyncio.Future[None]) -> None:
        """A reader no longer waits."""
        with self.lock:
            self._readers.pop(future, None)

    def _notify(self) -> None:
        self._changed.notify_all()
        readers, self._readers = self._readers, {}
        for future, loop in readers.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(_set, future)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
