"""Whatever an engine calls, in whatever order: the invariants of the paper hold, and every request ends."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scheduler_driver import TOKEN, ids, make_scheduler, schedule, submit

from orca_hf.errors import CapacityError
from orca_hf.request import Request, RequestState
from orca_hf.scheduler import Iteration


@dataclass
class Shadow:
    """What the machine below believes about one request, kept without reading the request."""

    request: Request
    prompt_len: int
    max_new_tokens: int
    generated: int = 0
    computed: int = 0
    admitted: bool = False
    ended: bool = False
    cancelled_in_flight: bool = False
    runs: int = 0  # iterations it was in
    ever_held: bool = False  # an iteration was selected while its token was missing

    @property
    def known(self) -> int:
        return self.prompt_len + self.generated

    @property
    def max_slots(self) -> int:
        return self.prompt_len + self.max_new_tokens - 1


@dataclass
class Flight:
    """An iteration in flight and what it will have computed of each request."""

    iteration: Iteration
    reaches: dict[int, int] = field(default_factory=dict)


class SchedulerMachine(RuleBasedStateMachine):
    """Any sequence of calls that an engine may make, against the invariants of the paper."""

    def __init__(self) -> None:
        super().__init__()
        self.shadows: list[Shadow] = []  # by arrival
        self.flights: list[Flight] = []  # oldest first

    @initialize(
        num_blocks=st.integers(1, 24),
        block_size=st.sampled_from([1, 2, 4, 8]),
        spare_slots=st.integers(0, 7),
        max_batch_size=st.integers(1, 4),
        spare_tokens=st.none() | st.integers(0, 8),
        num_workers=st.integers(1, 3),
        oldest_first=st.booleans(),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        spare_slots: int,
        max_batch_size: int,
        spare_tokens: int | None,
        num_workers: int,
        oldest_first: bool,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_batch_size = max_batch_size
        self.budget = None if spare_tokens is None else max_batch_size + spare_tokens
        self.num_workers = num_workers
        self.oldest_first = oldest_first
        self.scheduler = make_scheduler(
            num_slots=num_blocks * block_size + spare_slots % block_size,
            block_size=block_size,
            max_batch_size=max_batch_size,
            max_batch_tokens=self.budget,
            num_workers=num_workers,
        )

    # What the machine derives for itself.

    def blocks_of(self, shadow: Shadow) -> int:
        return -(-shadow.max_slots // self.block_size)

    @property
    def live(self) -> list[Shadow]:
        return [shadow for shadow in self.shadows if not shadow.ended]

    @property
    def holders(self) -> list[Shadow]:
        return [shadow for shadow in self.live if shadow.admitted]

    @property
    def in_flight(self) -> set[int]:
        return {i for flight in self.flights for i in flight.reaches}

    @property
    def resting(self) -> list[Shadow]:
        """Admitted, and in no iteration."""
        return [shadow for shadow in self.holders if shadow.request.request_id not in self.in_flight]

    @property
    def held(self) -> list[Shadow]:
        """Waiting for their next token."""
        return [shadow for shadow in self.resting if shadow.computed == shadow.known]

    # What an engine may do.

    @rule(prompt_len=st.integers(1, 14), max_new_tokens=st.integers(1, 6))
    def submit(self, prompt_len: int, max_new_tokens: int) -> None:
        request = Request(range(prompt_len), max_new_tokens)
        shadow = Shadow(request, prompt_len, max_new_tokens)
        if self.blocks_of(shadow) > self.num_blocks:
            with pytest.raises(CapacityError):
                self.scheduler.submit(request)
        else:
            self.scheduler.submit(request)
            assert request.request_id == len(self.shadows)
            self.shadows.append(shadow)

    @rule()
    def schedule(self) -> None:
        runnable = [shadow for shadow in self.resting if shadow.computed < shadow.known]
        queue = [shadow for shadow in self.live if not shadow.admitted]
        num_free = self.num_blocks - sum(map(self.blocks_of, self.holders))
        held = self.held
        iteration = self.scheduler.schedule()
        if len(self.flights) == self.num_workers:
            assert iteration is None
            return
        for shadow in held:
            shadow.ever_held = True
        if iteration is None:
            assert not runnable
            assert not queue or self.blocks_of(queue[0]) > num_free
            return

        batch = [self.shadows[i] for i in ids(iteration)]
        flight = Flight(iteration)
        for shadow, step in zip(batch, iteration.steps, strict=True):
            assert step.request is shadow.request
            assert step.start == shadow.computed
            assert 1 <= step.length <= shadow.known - shadow.computed
            assert step.samples == (step.start + step.length == shadow.known)
            assert step.samples or self.budget is not None
            flight.reaches[shadow.request.request_id] = step.start + step.length
        num_tokens = sum(step.length for step in iteration.steps)
        assert iteration.num_tokens == num_tokens
        assert len(batch) <= self.max_batch_size
        assert self.budget is None or num_tokens <= self.budget

        # Whom: the earliest runnable requests, then the earliest of the queue, as many as fit and no more.
        num_admitted = max(0, len(batch) - len(runnable))
        assert batch == runnable[: self.max_batch_size] + queue[:num_admitted]
        num_free -= sum(map(self.blocks_of, queue[:num_admitted]))
        assert num_free >= 0
        if num_tokens != self.budget and len(batch) < self.max_batch_size and num_admitted < len(queue):
            assert self.blocks_of(queue[num_admitted]) > num_free
        # How much: whoever is cut short used the budget up, and none after it has more than its sure token.
        cut = [index for index, step in enumerate(iteration.steps) if not step.samples]
        if cut:
            assert num_tokens == self.budget
            assert all(step.length == 1 for step in iteration.steps[cut[0] + 1 :])
            assert all(shadow in runnable for shadow in batch[cut[0] + 1 :])

        for shadow in batch:
            shadow.admitted = True
            shadow.runs += 1
        self.flights.append(flight)

    @precondition(lambda self: self.flights)
    @rule(
        index=st.integers(0, 2),
        outcomes=st.lists(st.sampled_from(["token", "token", "token", "end", "hold"]), min_size=4, max_size=4),
    )
    def complete(self, index: int, outcomes: list[str]) -> None:
        flight = self.take_back(index)
        self.scheduler.complete(flight.iteration)
        for i, reached in flight.reaches.items():
            self.shadows[i].computed = reached
        self.end_cancelled(flight)
        for step, outcome in zip(flight.iteration.steps, outcomes, strict=False):
            shadow = self.shadows[step.request.request_id]
            if shadow.ended:
                continue
            if step.samples and outcome != "hold":
                self.give_token(shadow, last=outcome == "end")

    @precondition(lambda self: self.flights)
    @rule(index=st.integers(0, 2))
    def abandon(self, index: int) -> None:
        flight = self.take_back(index)
        self.scheduler.abandon(flight.iteration)
        self.end_cancelled(flight)

    @precondition(lambda self: self.held)
    @rule(index=st.integers(0, 50), last=st.booleans())
    def deliver_late_token(self, index: int, last: bool) -> None:
        held = self.held
        self.give_token(held[index % len(held)], last=last)

    @precondition(lambda self: self.flights)
    @rule(index=st.integers(0, 2))
    def run_half_again(self, index: int) -> None:
        flight = self.take_back(index)
        self.scheduler.abandon(flight.iteration)
        self.end_cancelled(flight)
        half = flight.iteration.steps[: (len(flight.iteration.steps) + 1) // 2]
        unended = tuple(step for step in half if not self.shadows[step.request.request_id].ended)
        resumed = self.scheduler.resume(Iteration(half))
        if not unended:
            assert resumed is None
            return
        assert resumed == Iteration(unended)
        again = Flight(resumed)
        for step in unended:
            again.reaches[step.request.request_id] = step.start + step.length
            self.shadows[step.request.request_id].runs += 1
        self.flights.insert(0, again)  # it runs before anything else that is scheduled

    @precondition(lambda self: self.shadows)
    @rule(index=st.integers(0, 50))
    def cancel(self, index: int) -> None:
        shadow = self.shadows[-1 - index % len(self.shadows)]
        self.scheduler.cancel(shadow.request)
        if shadow.request.request_id in self.in_flight:
            shadow.cancelled_in_flight = True
        else:
            shadow.ended = True

    def take_back(self, index: int) -> Flight:
        return self.flights.pop(0 if self.oldest_first else index % len(self.flights))

    def end_cancelled(self, flight: Flight) -> None:
        for i in flight.reaches:
            if self.shadows[i].cancelled_in_flight:
                self.shadows[i].ended = True

    def give_token(self, shadow: Shadow, *, last: bool) -> None:
        self.scheduler.append(shadow.request, [TOKEN])
        shadow.generated += 1
        if last or shadow.generated == shadow.max_new_tokens:
            self.scheduler.finish(shadow.request)
            shadow.ended = True

    # What must hold after every call.

    @invariant()
    def admitted_requests_are_a_prefix_of_the_arrivals(self) -> None:
        has_blocks = [bool(shadow.request.blocks) for shadow in self.live]
        assert has_blocks == sorted(has_blocks, reverse=True)
        assert [bool(shadow.request.blocks) for shadow in self.shadows] == [
            shadow in self.holders for shadow in self.shadows
        ]
        assert all(shadow.request.first_slot is None for shadow in self.shadows if not shadow.request.blocks)

    @invariant()
    def ledger_is_the_sum_of_the_reservations(self) -> None:
        reserved = sum(self.blocks_of(shadow) for shadow in self.holders) * self.block_size
        assert self.scheduler.kv_manager.num_reserved == reserved
        assert reserved <= self.scheduler.kv_manager.num_slots == self.num_blocks * self.block_size

    @invariant()
    def no_two_requests_share_a_slot(self) -> None:
        blocks = [block for shadow in self.shadows for block in shadow.request.blocks]
        assert len(blocks) == len(set(blocks))
        assert set(blocks) <= set(range(self.num_blocks))

    @invariant()
    def no_request_outgrows_its_reservation(self) -> None:
        for shadow in self.holders:
            assert len(shadow.request.blocks) == self.blocks_of(shadow)
            assert shadow.known <= shadow.max_slots
            assert shadow.request.first_slot in (None, shadow.request.blocks[0] * self.block_size)
            first = shadow.request.blocks[0]
            consecutive = shadow.request.blocks == tuple(range(first, first + len(shadow.request.blocks)))
            assert (shadow.request.first_slot is not None) == consecutive

    @invariant()
    def every_request_stands_where_the_calls_put_it(self) -> None:
        flying = Counter(i for flight in self.flights for i in ids(flight.iteration))
        assert not flying or max(flying.values()) == 1
        for i, shadow in enumerate(self.shadows):
            request = shadow.request
            assert (request.state is RequestState.IN_FLIGHT) == (i in flying)
            assert (request.state is RequestState.WAITING) == (not shadow.ended and not shadow.admitted)
            assert request.finished == shadow.ended
            assert (request.computed, request.known) == (shadow.computed, shadow.known)

    @invariant()
    def counters_count(self) -> None:
        assert self.scheduler.num_waiting == len(self.live) - len(self.holders)
        assert self.scheduler.num_admitted == len(self.holders)
        assert self.scheduler.idle == (not self.live)

    @invariant()
    def who_came_earlier_ran_at_least_as_often(self) -> None:
        # Iteration-level FCFS. It needs the paper's order of return; requests once held for a token are left out.
        if self.oldest_first:
            runs = [shadow.runs for shadow in self.holders if not shadow.ever_held]
            assert runs == sorted(runs, reverse=True)

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        work_left = sum(shadow.prompt_len + shadow.max_new_tokens for shadow in self.live) + len(self.flights)
        for shadow in self.held:
            self.give_token(shadow, last=False)
        while self.live:
            assert work_left > 0, "requests are left that never run"
            work_left -= 1
            if len(self.flights) < self.num_workers:
                self.schedule()
            self.complete(0, ["token"] * 4)
            self.counters_count()
        assert not self.flights
        assert self.scheduler.schedule() is None
        assert all(shadow.request.finished for shadow in self.shadows)
        assert self.scheduler.kv_manager.num_reserved == 0
        # The free blocks are one run again: a request as large as the pool gets all of it, in order.
        whole = submit(self.scheduler, self.num_blocks * self.block_size, 1)
        schedule(self.scheduler)
        assert whole.blocks == tuple(range(self.num_blocks))


TestAnyOrderOfCalls = SchedulerMachine.TestCase
TestAnyOrderOfCalls.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
