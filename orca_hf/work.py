"""What engines have done: counts that only grow, and the last iterations one by one."""

import threading
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

from orca_hf.scheduler import Iteration

_KEPT = 256


class Share(NamedTuple):
    """A request's part of an iteration.

    Attributes:
        request_id: Its arrival number.
        kind: "prefill" where it began in the prompt, else "decode".
        num_tokens: Tokens computed.
    """

    request_id: int
    kind: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class IterationRecord:
    """One iteration that ran.

    Attributes:
        started: When, on the engine's clock (monotonic, seconds).
        duration: Seconds in the forward.
        shares: Its requests, in order of arrival.
    """

    started: float
    duration: float
    shares: tuple[Share, ...]


@dataclass(frozen=True, slots=True)
class WorkDone:
    """The counts at one moment.

    Attributes:
        num_iterations: Iterations run.
        num_prompt_tokens: Tokens of prompts computed.
        num_generated_tokens: Tokens generated.
        num_draft_tokens: Guesses at tokens that were computed along.
        num_accepted_tokens: Those of them that the model chose.
        recent: The last iterations, oldest first.
    """

    num_iterations: int
    num_prompt_tokens: int
    num_generated_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int
    recent: tuple[IterationRecord, ...]


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The engine's state at one moment, and its work so far.

    Attributes:
        num_waiting: Requests that hold no slots yet.
        num_admitted: Requests that hold slots.
        num_slots: Slots there are.
        num_reserved: Slots reserved.
        num_used: Slots of these whose K/V are computed.
        num_iterations: Iterations run.
        num_tokens: Tokens that went through the model.
        kv_bytes: K/V memory that is set aside.
        packed_bytes: Memory of packed weights.
        num_graphs: CUDA graphs captured.
        no_graphs: Why there are none although they were asked for; None where that is not so.
    """

    num_waiting: int
    num_admitted: int
    num_slots: int
    num_reserved: int
    num_used: int
    num_iterations: int
    num_tokens: int
    kv_bytes: int
    packed_bytes: int
    num_graphs: int
    no_graphs: str | None


class Work:
    """Counts the work of one model's engines, one after another or at the same time."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._num_iterations = 0
        self._num_prompt_tokens = 0
        self._num_generated_tokens = 0
        self._num_draft_tokens = 0
        self._num_accepted_tokens = 0
        self._recent: deque[IterationRecord] = deque(maxlen=_KEPT)

    @property
    def locks(self) -> tuple[Any, ...]:
        """What a thread holds while it counts."""
        return (self._lock,)

    def add_iteration(self, iteration: Iteration, started: float, duration: float) -> None:
        """Count an iteration that ran; nothing of its requests is kept but numbers."""
        shares = tuple([
            Share(request.request_id, "prefill" if start < len(request.prompt) else "decode", length)
            for request, start, length, _, _ in iteration.steps
        ])  # fmt: skip
        with self._lock:
            self._num_iterations += 1
            self._num_prompt_tokens += sum(share.num_tokens for share in shares if share.kind == "prefill")
            self._recent.append(IterationRecord(started, duration, shares))

    def add_tokens(self, num_tokens: int) -> None:
        """Count tokens generated."""
        with self._lock:
            self._num_generated_tokens += num_tokens

    def add_draft(self, num_tokens: int, num_accepted: int) -> None:
        """Count guesses that have been judged."""
        with self._lock:
            self._num_draft_tokens += num_tokens
            self._num_accepted_tokens += num_accepted

    @property
    def done(self) -> WorkDone:
        """All of it, up to now."""
        with self._lock:
            return WorkDone(
                self._num_iterations,
                self._num_prompt_tokens,
                self._num_generated_tokens,
                self._num_draft_tokens,
                self._num_accepted_tokens,
                tuple(self._recent),
            )
