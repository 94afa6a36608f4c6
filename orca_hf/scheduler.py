"""Orca's Algorithm 1: which requests run in the next iteration. Pure Python, no tensors, no clock, no threads."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from orca_hf.kv_manager import KVManager
from orca_hf.request import Request, RequestState


class Step(NamedTuple):  # a frozen dataclass takes three times as long to make, and hundreds are made an iteration
    """One request's share of an iteration: its tokens [start, start + length).

    `samples` says whether the step reaches the last known token, so that the next one is sampled at its end. The last
    of the tokens are then `draft`: guesses at what comes next, computed beside it to be judged.
    """

    request: Request
    start: int
    length: int
    samples: bool
    draft: tuple[int, ...] = ()

    @property
    def num_samples(self) -> int:
        """Rows of logits that are wanted: that of the last known token, and of each guess."""
        return 1 + len(self.draft) if self.samples else 0


@dataclass(frozen=True, slots=True)
class Iteration:
    """All that the model computes in one forward, in order of arrival."""

    steps: tuple[Step, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of all steps together: the length of the flattened batch."""
        return sum(step.length for step in self.steps)


class Scheduler:
    """Iteration-level first-come-first-served scheduling with reserved K/V (Orca, Algorithm 1).

    Requests run in order of arrival. A request is admitted when its whole reservation fits, and nobody overtakes one
    that does not fit yet: the paper's `break`. Up to `num_workers` iterations may be in flight, one for each pipeline
    stage (Figure 8a).

    Beyond the paper, `max_batch_tokens` bounds an iteration's tokens. Each running request first gets the one token
    that keeps it going; what is left goes to those with more to compute, earliest first; then new requests are
    admitted. So a long prompt is computed in chunks beside the decodes of the others, and whoever arrived earlier
    still runs in every iteration in which a later one runs, as long as iterations return oldest first and nobody waits
    for a token.

    Args:
        kv_manager: The ledger of slots.
        max_batch_size: Most requests in an iteration (`max_bs`).
        max_batch_tokens: Most tokens in an iteration, at least `max_batch_size`; None for whole prompts.
        num_workers: Most iterations in flight (`n_workers`).
    """

    def __init__(
        self,
        kv_manager: KVManager,
        *,
        max_batch_size: int,
        max_batch_tokens: int | None = None,
        num_workers: int = 1,
    ) -> None:
        assert max_batch_size >= 1
        assert num_workers >= 1
        assert max_batch_tokens is None or max_batch_tokens >= max_batch_size
        self.kv_manager = kv_manager
        self.max_batch_size = max_batch_size
        self.max_batch_tokens = max_batch_tokens
        self.num_workers = num_workers
        self._waiting: deque[Request] = deque()  # by arrival; may hold cancelled ones, skipped when met
        self._admitted: dict[int, Request] = {}  # by arrival, since admission never overtakes
        self._next_id = 0
        self._num_in_flight = 0
        self.num_waiting = 0  # requests submitted, not admitted and not cancelled

    @property
    def num_admitted(self) -> int:
        """Requests that hold slots."""
        return len(self._admitted)

    @property
    def idle(self) -> bool:
        """Whether no request is waiting or admitted."""
        return not self._admitted and self.num_waiting == 0

    @property
    def num_used(self) -> int:
        """Slots whose K/V are computed, of those reserved."""
        return sum(request.computed for request in self._admitted.values())

    def faults(self) -> list[str]:
        """What contradicts itself between iterations, in words; empty unless there is a defect."""
        found = []
        blocks = [block for request in self._admitted.values() for block in request.blocks]
        if len(set(blocks)) != len(blocks):
            found.append("two requests hold one block")
        if len(blocks) * self.kv_manager.block_size != self.kv_manager.num_reserved:
            found.append(f"{self.kv_manager.num_reserved} slots are reserved, and requests hold {len(blocks)} blocks")
        if sum(not request.finished for request in self._waiting) != self.num_waiting:
            found.append(f"{self.num_waiting} requests are counted as waiting")
        if self._num_in_flight == 0 and any(r.state is not RequestState.READY for r in self._admitted.values()):
            found.append("a request is in flight without an iteration")
        return found

    def number_on(self, other: "Scheduler") -> None:
        """Go on with the arrival numbers of `other`, in whose place this one comes."""
        self._next_id = other._next_id

    def submit(self, request: Request) -> None:
        """Put `request` into the pool.

        Raises:
            CapacityError: It could never be admitted.
        """
        self.kv_manager.check_fits(len(request.prompt), request.max_new_tokens)
        request.request_id = self._next_id
        self._next_id += 1
        self._waiting.append(request)
        self.num_waiting += 1

    def schedule(self) -> Iteration | None:
        """Select the next iteration, and put it in flight.

        Returns:
            The iteration, or None when there is nothing to run now: no request has tokens to compute, or
            `num_workers` iterations are in flight already.
        """
        if self._num_in_flight == self.num_workers:
            return None
        selected = self._runnable()
        # The one token that each selected request is sure of is set aside before anyone gets a second.
        budget = None if self.max_batch_tokens is None else self.max_batch_tokens - len(selected)
        steps = []
        for request, uncomputed in selected:
            length = uncomputed
            if budget is not None and uncomputed > 1:
                length = min(uncomputed, 1 + budget)
                budget -= length - 1
            steps.append(self._step(request, length, uncomputed))
        while len(steps) < self.max_batch_size and budget != 0:
            admitted = self._admit()
            if admitted is None:
                break
            uncomputed = length = admitted.uncomputed
            if budget is not None:
                length = min(uncomputed, budget)
                budget -= length
            steps.append(self._step(admitted, length, uncomputed))
        if not steps:
            return None
        self._num_in_flight += 1
        return Iteration(tuple(steps))

    def _runnable(self) -> list[tuple[Request, int]]:
        """The admitted requests that run now, each with its uncomputed tokens."""
        selected: list[tuple[Request, int]] = []
        ready = RequestState.READY
        for request in self._admitted.values():
            if request.state is ready and (uncomputed := request.uncomputed):
                selected.append((request, uncomputed))
                if len(selected) == self.max_batch_size:
                    break
        return selected

    def _admit(self) -> Request | None:
        while self._waiting and self._waiting[0].finished:
            self._waiting.popleft()
        if not self._waiting or not self.kv_manager.can_reserve(self._waiting[0]):
            return None
        request = self._waiting.popleft()
        self.num_waiting -= 1
        self.kv_manager.reserve(request)
        self._admitted[request.request_id] = request
        return request

    @staticmethod
    def _step(request: Request, length: int, uncomputed: int) -> Step:
        request.state = RequestState.IN_FLIGHT
        return Step(request, request.computed, length, length == uncomputed)

    def complete(self, iteration: Iteration) -> None:
        """Take back an iteration that ran: its tokens' K/V are in memory now, those of guesses not yet counted."""
        for request, start, length, _, draft in iteration.steps:
            request.computed = start + length - len(draft)
        self._land(step.request for step in iteration.steps)

    def abandon(self, iteration: Iteration) -> None:
        """Take back an iteration that did not run to its end; its steps will be scheduled again."""
        self._land(step.request for step in iteration.steps)

    def resume(self, iteration: Iteration) -> Iteration | None:
        """Put in flight again what has been abandoned, or a part of it, before anything else is scheduled.

        Returns:
            The steps of it whose requests have not ended meanwhile; None if there are none.
        """
        steps = tuple(step for step in iteration.steps if not step.request.finished)
        if not steps:
            return None
        for step in steps:
            step.request.state = RequestState.IN_FLIGHT
        self._num_in_flight += 1
        return Iteration(steps)

    def _land(self, requests: Iterable[Request]) -> None:
        self._num_in_flight -= 1
        for request in requests:
            request.state = RequestState.READY
            if request.cancelled:
                self._end(request, RequestState.CANCELLED)

    def append(self, request: Request, tokens: Sequence[int]) -> None:
        """Add what was sampled for `request`, which makes it runnable again: guesses that were right, and one token."""
        assert request.state is RequestState.READY, f"{request} cannot take a token"
        assert request.uncomputed == 0, f"{request} has tokens to compute first"
        request.generated += tokens
        request.computed += len(tokens) - 1  # the K/V of guesses are in memory

    def finish(self, request: Request) -> None:
        """End `request` and take its slots back; it must not be in flight."""
        assert request.state is RequestState.READY, f"{request} cannot finish"
        self._end(request, RequestState.FINISHED)

    def cancel(self, request: Request) -> None:
        """End `request` in whichever state it is; one in flight ends when its iteration returns."""
        if request.state is RequestState.IN_FLIGHT:
            request.cancelled = True
        elif not request.finished:
            self._end(request, RequestState.CANCELLED)

    def _end(self, request: Request, state: RequestState) -> None:
        if request.state is RequestState.WAITING:
            self.num_waiting -= 1
        request.state = state
        self._admitted.pop(request.request_id, None)
        self.kv_manager.release(request)
