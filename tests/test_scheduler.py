"""The scheduler is Orca's Algorithm 1: plain cases, and the paper's text as the oracle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_driver import TOKEN, ids, land, make_scheduler, run_once, schedule, spans, submit

from orca_hf.errors import CapacityError, RequestError
from orca_hf.request import Request, RequestState
from orca_hf.scheduler import Iteration


@dataclass(frozen=True)
class Trace:
    """All requests arrive at once; `iterations` is everything that runs, to the end."""

    name: str
    requests: list[tuple[int, int]]  # (prompt_len, max_new_tokens)
    iterations: list[str]
    max_batch_size: int = 4
    max_batch_tokens: int | None = None
    num_slots: int = 64
    block_size: int = 1


TRACES = [
    Trace(
        "a finished request leaves at once and the next takes its place in the following iteration",
        requests=[(2, 1), (3, 3), (4, 2)],
        max_batch_size=2,
        iterations=["0:0+2! 1:0+3!", "1:3+1! 2:0+4!", "1:4+1! 2:4+1!"],
    ),
    Trace(
        "max_batch_size bounds the requests of an iteration, earliest first",
        requests=[(1, 2), (1, 2), (1, 2), (1, 1)],
        max_batch_size=3,
        iterations=["0:0+1! 1:0+1! 2:0+1!", "0:1+1! 1:1+1! 2:1+1!", "3:0+1!"],
    ),
    Trace(
        "a small request does not overtake a large one that does not fit yet",
        requests=[(4, 2), (8, 1), (1, 1)],  # 5, 8 and 1 slots
        num_slots=10,
        iterations=["0:0+4!", "0:4+1!", "1:0+8! 2:0+1!"],
    ),
    Trace(
        "released slots admit in order of arrival, as many as fit",
        requests=[(4, 1), (4, 2), (3, 2), (1, 3), (4, 1)],  # 4, 5, 4, 3 and 4 slots
        num_slots=9,
        iterations=["0:0+4! 1:0+4!", "1:4+1! 2:0+3!", "2:3+1! 3:0+1!", "3:1+1! 4:0+4!", "3:2+1!"],
    ),
    Trace(
        "a reservation is the prompt and all tokens but the last, so 4 + 2 - 1 twice fills 10 slots",
        requests=[(4, 2), (4, 2)],
        num_slots=10,
        iterations=["0:0+4! 1:0+4!", "0:4+1! 1:4+1!"],
    ),
    Trace(
        "reservations are counted in whole blocks",
        requests=[(5, 1), (1, 1), (3, 1)],  # 2, 1 and 1 blocks of 4, out of 3
        num_slots=15,
        block_size=4,
        iterations=["0:0+5! 1:0+1!", "2:0+3!"],
    ),
    Trace(
        "without a token budget every prompt runs whole",
        requests=[(20, 2), (1, 1), (30, 1)],
        iterations=["0:0+20! 1:0+1! 2:0+30!", "0:20+1!"],
    ),
    Trace(
        "a long prompt is computed in chunks beside the decodes of those that came earlier",
        requests=[(1, 4), (7, 2)],
        max_batch_tokens=4,
        iterations=["0:0+1! 1:0+3", "0:1+1! 1:3+3", "0:2+1! 1:6+1!", "0:3+1! 1:7+1!"],
    ),
    Trace(
        "who is still in its prompt keeps one token for each later running request, and gets the rest",
        requests=[(10, 1), (3, 2), (1, 1)],
        max_batch_size=3,
        max_batch_tokens=6,
        iterations=["0:0+6", "0:6+4! 1:0+2", "1:2+1! 2:0+1!", "1:3+1!"],
    ),
    Trace(
        "the earliest prompt takes what is left of the budget before the next one gets a second token",
        requests=[(2, 3), (9, 1), (9, 1)],
        max_batch_size=3,
        max_batch_tokens=8,
        iterations=["0:0+2! 1:0+6", "0:2+1! 1:6+3! 2:0+4", "0:3+1! 2:4+5!"],
    ),
    Trace(
        "a budget equal to max_batch_size still gives every running request its token",
        requests=[(1, 3), (1, 3), (4, 1)],
        max_batch_size=3,
        max_batch_tokens=3,
        iterations=["0:0+1! 1:0+1! 2:0+1", "0:1+1! 1:1+1! 2:1+1", "0:2+1! 1:2+1! 2:2+1", "2:3+1!"],
    ),
    Trace(
        "nobody is admitted into an iteration whose tokens are spent",
        requests=[(4, 1), (1, 1)],
        max_batch_tokens=4,
        iterations=["0:0+4!", "1:0+1!"],
    ),
]


@pytest.mark.parametrize("trace", TRACES, ids=lambda trace: trace.name.replace(" ", "_"))
def test_trace(trace: Trace) -> None:
    scheduler = make_scheduler(
        num_slots=trace.num_slots,
        block_size=trace.block_size,
        max_batch_size=trace.max_batch_size,
        max_batch_tokens=trace.max_batch_tokens,
    )
    for prompt_len, max_new_tokens in trace.requests:
        submit(scheduler, prompt_len, max_new_tokens)
    iterations = []
    while not scheduler.idle:
        iterations.append(spans(run_once(scheduler)))
    assert iterations == trace.iterations
    assert scheduler.schedule() is None
    assert scheduler.kv_manager.num_reserved == 0


def test_late_arrival_joins_the_running_batch() -> None:
    scheduler = make_scheduler()
    submit(scheduler, 3, 4)
    run_once(scheduler)
    submit(scheduler, 5, 2)
    assert spans(run_once(scheduler)) == "0:3+1! 1:0+5!"


def test_num_tokens_is_the_length_of_the_flattened_batch() -> None:
    scheduler = make_scheduler()
    submit(scheduler, 3, 4)
    run_once(scheduler)
    submit(scheduler, 5, 2)
    assert schedule(scheduler).num_tokens == 6


def test_reservation_is_made_once_and_kept_to_the_end() -> None:
    scheduler = make_scheduler()
    request = submit(scheduler, 3, 4)
    assert scheduler.kv_manager.num_reserved == 0
    blocks = set()
    for _ in range(4):
        iteration = schedule(scheduler)
        blocks.add(request.blocks)
        assert scheduler.kv_manager.num_reserved == 6
        land(scheduler, iteration)
    assert blocks == {(0, 1, 2, 3, 4, 5)}
    assert request.blocks == ()
    assert request.first_slot is None
    assert scheduler.kv_manager.num_reserved == 0


def test_early_end_returns_the_whole_reservation() -> None:
    scheduler = make_scheduler(num_slots=10)
    first, second = submit(scheduler, 4, 7), submit(scheduler, 4, 7)  # 10 slots each
    iteration = schedule(scheduler)
    scheduler.complete(iteration)
    scheduler.append(first, [TOKEN])
    scheduler.finish(first)  # an EOS
    assert first.state is RequestState.FINISHED
    assert ids(schedule(scheduler)) == [second.request_id]


def test_figure_8a_three_batches_in_flight() -> None:
    scheduler = make_scheduler(max_batch_size=2, num_workers=3)
    for _ in range(6):
        submit(scheduler, 2, 3)
    in_flight = [schedule(scheduler) for _ in range(3)]
    assert [ids(iteration) for iteration in in_flight] == [[0, 1], [2, 3], [4, 5]]
    for round_trip in range(1, 3):
        for pair in ([0, 1], [2, 3], [4, 5]):
            assert scheduler.schedule() is None
            land(scheduler, in_flight.pop(0))
            in_flight.append(schedule(scheduler))
            assert ids(in_flight[-1]) == pair
            assert [step.start for step in in_flight[-1].steps] == [1 + round_trip] * 2
    for iteration in in_flight:
        land(scheduler, iteration)
    assert scheduler.idle
    assert scheduler.kv_manager.num_reserved == 0


def test_request_in_flight_is_in_no_second_iteration() -> None:
    scheduler = make_scheduler(num_workers=3)
    submit(scheduler, 2, 3)
    in_flight = schedule(scheduler)
    assert scheduler.schedule() is None
    submit(scheduler, 2, 3)
    assert ids(scheduler.schedule()) == [1]
    assert scheduler.schedule() is None
    land(scheduler, in_flight)
    assert ids(scheduler.schedule()) == [0]


def test_schedule_without_work_takes_no_worker() -> None:
    scheduler = make_scheduler(num_workers=1)
    assert scheduler.schedule() is None
    submit(scheduler, 1, 1)
    assert ids(scheduler.schedule()) == [0]


@pytest.mark.parametrize("take_back", ["complete", "abandon"])
def test_returned_iteration_frees_its_worker(take_back: str) -> None:
    scheduler = make_scheduler(num_workers=1)
    submit(scheduler, 1, 5)
    iteration = schedule(scheduler)
    submit(scheduler, 1, 1)
    assert scheduler.schedule() is None
    getattr(scheduler, take_back)(iteration)
    assert 1 in ids(scheduler.schedule())


def test_request_without_its_token_is_left_out_and_keeps_its_place() -> None:
    scheduler = make_scheduler(max_batch_size=2)
    held = submit(scheduler, 2, 3)
    submit(scheduler, 2, 3)
    submit(scheduler, 2, 3)
    scheduler.complete(iteration := schedule(scheduler))
    scheduler.append(iteration.steps[1].request, [TOKEN])
    assert (held.computed, held.known, held.uncomputed) == (2, 2, 0)
    assert ids(run_once(scheduler)) == [1, 2]
    scheduler.append(held, [TOKEN])
    assert spans(schedule(scheduler)) == "0:2+1! 1:3+1!"


def test_nothing_runs_while_every_request_waits_for_its_token() -> None:
    scheduler = make_scheduler()
    request = submit(scheduler, 2, 3)
    scheduler.complete(schedule(scheduler))
    assert scheduler.schedule() is None
    assert not scheduler.idle
    scheduler.append(request, [TOKEN])
    assert spans(schedule(scheduler)) == "0:2+1!"


def test_abandoned_iteration_runs_again_unchanged() -> None:
    scheduler = make_scheduler(max_batch_tokens=6)
    submit(scheduler, 2, 3)
    run_once(scheduler)
    submit(scheduler, 9, 3)
    iteration = schedule(scheduler)
    reserved = scheduler.kv_manager.num_reserved
    scheduler.abandon(iteration)
    assert scheduler.kv_manager.num_reserved == reserved
    assert spans(schedule(scheduler)) == spans(iteration) == "0:2+1! 1:0+5"


def test_a_part_of_an_abandoned_iteration_runs_again_as_it_was() -> None:
    scheduler = make_scheduler(max_batch_tokens=6)
    submit(scheduler, 2, 3)
    run_once(scheduler)
    submit(scheduler, 9, 3)
    iteration = schedule(scheduler)
    scheduler.abandon(iteration)
    first, second = (Iteration((step,)) for step in iteration.steps)
    assert scheduler.resume(second) == second
    assert scheduler.schedule() is None, "it is in flight, and no other may be"
    scheduler.complete(second)
    scheduler.cancel(first.steps[0].request)
    assert scheduler.resume(first) is None
    assert spans(schedule(scheduler)) == "1:5+4!"


def test_cancel_while_waiting() -> None:
    scheduler = make_scheduler(num_slots=10)
    submit(scheduler, 4, 2)
    too_large, small = submit(scheduler, 8, 1), submit(scheduler, 1, 1)
    run_once(scheduler)
    scheduler.cancel(too_large)
    assert too_large.state is RequestState.CANCELLED
    assert scheduler.num_waiting == 1
    assert ids(run_once(scheduler)) == [0, small.request_id]
    assert scheduler.idle


@pytest.mark.parametrize("token_came", [True, False])
def test_cancel_between_iterations_returns_the_slots_at_once(token_came: bool) -> None:
    scheduler = make_scheduler()
    request = submit(scheduler, 4, 3)
    scheduler.complete(schedule(scheduler))
    if token_came:
        scheduler.append(request, [TOKEN])
    scheduler.cancel(request)
    assert request.state is RequestState.CANCELLED
    assert request.blocks == ()
    assert scheduler.kv_manager.num_reserved == 0
    assert scheduler.idle


@pytest.mark.parametrize("take_back", ["complete", "abandon"])
def test_cancel_in_flight_keeps_the_slots_until_the_iteration_returns(take_back: str) -> None:
    scheduler = make_scheduler()
    cancelled, other = submit(scheduler, 4, 3), submit(scheduler, 2, 3)
    iteration = schedule(scheduler)
    scheduler.cancel(cancelled)
    scheduler.cancel(cancelled)
    assert cancelled.state is RequestState.IN_FLIGHT
    assert scheduler.kv_manager.num_reserved == 6 + 4
    assert not scheduler.idle
    getattr(scheduler, take_back)(iteration)
    assert cancelled.state is RequestState.CANCELLED
    assert cancelled.blocks == ()
    assert other.state is RequestState.READY
    assert scheduler.kv_manager.num_reserved == 4


def test_cancel_of_an_ended_request_does_nothing() -> None:
    scheduler = make_scheduler()
    finished, cancelled = submit(scheduler, 1, 1), submit(scheduler, 1, 1)
    scheduler.cancel(cancelled)
    scheduler.cancel(cancelled)
    run_once(scheduler)
    scheduler.cancel(finished)
    assert finished.state is RequestState.FINISHED
    assert cancelled.state is RequestState.CANCELLED
    assert scheduler.num_waiting == 0
    assert scheduler.kv_manager.num_reserved == 0


def test_cancel_of_everything_that_waits_leaves_an_idle_scheduler() -> None:
    scheduler = make_scheduler()
    for request in [submit(scheduler, 2, 2) for _ in range(5)]:
        scheduler.cancel(request)
    assert scheduler.idle
    assert scheduler.schedule() is None


@pytest.mark.parametrize(
    ("num_slots", "block_size", "prompt_len", "max_new_tokens", "numbers"),
    [
        (1024, 16, 900, 200, "prompt 900 + max_new_tokens 200 needs 1,099 slots, the pool has 1,024"),
        (10, 1, 11, 1, "prompt 11 + max_new_tokens 1 needs 11 slots, the pool has 10"),
        (15, 8, 9, 1, "prompt 9 + max_new_tokens 1 needs 9 slots, the pool has 8"),  # a part of a block is no block
        (4096, 16, 1, 10_000, "prompt 1 + max_new_tokens 10,000 needs 10,000 slots, the pool has 4,096"),
    ],
)
def test_request_that_could_never_run_is_refused_at_submit(
    num_slots: int, block_size: int, prompt_len: int, max_new_tokens: int, numbers: str
) -> None:
    scheduler = make_scheduler(num_slots=num_slots, block_size=block_size)
    with pytest.raises(CapacityError) as caught:
        submit(scheduler, prompt_len, max_new_tokens)
    assert numbers in str(caught.value)
    assert "raise max_slots" in str(caught.value)
    assert scheduler.idle
    assert scheduler.num_waiting == 0
    assert scheduler.schedule() is None


@pytest.mark.parametrize(
    ("num_slots", "block_size", "prompt_len", "max_new_tokens"),
    [(1024, 16, 900, 125), (10, 1, 10, 1), (15, 8, 8, 1), (16, 16, 1, 16)],
)
def test_request_that_fills_the_pool_exactly_runs(
    num_slots: int, block_size: int, prompt_len: int, max_new_tokens: int
) -> None:
    scheduler = make_scheduler(num_slots=num_slots, block_size=block_size)
    request = submit(scheduler, prompt_len, max_new_tokens)
    for _ in range(max_new_tokens):
        run_once(scheduler)
    assert request.state is RequestState.FINISHED
    assert scheduler.idle


def test_counters_follow_a_request_through_its_life() -> None:
    scheduler = make_scheduler(max_batch_size=1)

    def counters() -> tuple[int, int, bool]:
        return scheduler.num_waiting, scheduler.num_admitted, scheduler.idle

    assert counters() == (0, 0, True)
    submit(scheduler, 2, 2)
    submit(scheduler, 2, 1)
    third = submit(scheduler, 2, 1)
    assert counters() == (3, 0, False)
    first_iteration = schedule(scheduler)
    assert counters() == (2, 1, False)
    scheduler.cancel(third)
    assert counters() == (1, 1, False)
    land(scheduler, first_iteration)
    assert counters() == (1, 1, False)
    run_once(scheduler)
    assert counters() == (1, 0, False)
    second_iteration = schedule(scheduler)
    assert counters() == (0, 1, False)
    land(scheduler, second_iteration)
    assert counters() == (0, 0, True)


def test_request_ids_are_arrival_numbers() -> None:
    scheduler = make_scheduler()
    assert Request([1], 1).request_id == -1
    assert [submit(scheduler, 1, 1).request_id for _ in range(3)] == [0, 1, 2]


def test_misuse_by_an_engine_trips_an_assertion() -> None:
    scheduler = make_scheduler(max_batch_tokens=4)
    request = submit(scheduler, 6, 2)
    with pytest.raises(AssertionError, match="cannot finish"):
        scheduler.finish(request)
    iteration = schedule(scheduler)
    with pytest.raises(AssertionError, match="cannot take a token"):
        scheduler.append(request, [TOKEN])
    with pytest.raises(AssertionError, match="cannot finish"):
        scheduler.finish(request)
    scheduler.complete(iteration)
    with pytest.raises(AssertionError, match="tokens to compute first"):
        scheduler.append(request, [TOKEN])


@pytest.mark.parametrize(
    ("start", "stop", "expected"),
    [
        (0, 3, [10, 11, 12]),
        (1, 2, [11]),
        (3, 5, [20, 21]),
        (4, 5, [21]),
        (0, 5, [10, 11, 12, 20, 21]),
        (2, 4, [12, 20]),
        (3, 3, []),
    ],
)
def test_tokens_span_prompt_and_generated_alike(start: int, stop: int, expected: list[int]) -> None:
    request = Request([10, 11, 12], 5)
    request.generated += [20, 21]
    assert request.tokens(start, stop) == expected


@pytest.mark.parametrize(
    ("prompt", "max_new_tokens", "words"),
    [([], 1, "no tokens"), ([1], 0, "max_new_tokens is 0"), ([1], -3, "max_new_tokens is -3")],
)
def test_malformed_request_is_refused(prompt: list[int], max_new_tokens: int, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        Request(prompt, max_new_tokens)


@dataclass(frozen=True)
class Arrival:
    """One request of a random workload: it ends after `end_after` tokens, or at its limit."""

    prompt_len: int
    max_new_tokens: int
    end_after: int
    at: int  # number of selections made before it arrives

    @property
    def num_generated(self) -> int:
        return min(self.max_new_tokens, self.end_after)


def algorithm_1(
    arrivals: Sequence[Arrival], n_workers: int, max_bs: int, n_slots: int, block_size: int
) -> list[list[tuple[int, int]]]:
    """Algorithm 1 of the paper, line by line, returning each iteration as (request, number of input tokens).

    Its max_tokens is prompt + generated - 1 in whole blocks. Where the paper leaves it open, an empty selection is not
    run: the loop waits for the oldest batch instead, and for the next arrival if there is none.
    """
    state: dict[int, str] = {}  # the request pool, in order of arrival
    generated: Counter[int] = Counter()
    max_tokens = [-(-(a.prompt_len + a.max_new_tokens - 1) // block_size) * block_size for a in arrivals]
    scheduled: list[list[int]] = []
    n_rsrv = 0
    history = []
    selections = 0
    while state or selections <= max(a.at for a in arrivals):
        for i, arrival in enumerate(arrivals):
            if arrival.at == selections:
                state[i] = "INITIATION"
        selections += 1

        batch: list[int] = []
        for i in sorted(state):
            if state[i] == "RUNNING":
                continue
            if len(batch) == max_bs:
                break
            if state[i] == "INITIATION":
                if n_rsrv + max_tokens[i] > n_slots:
                    break
                n_rsrv += max_tokens[i]
            batch.append(i)

        if batch:
            history.append([(i, arrivals[i].prompt_len if state[i] == "INITIATION" else 1) for i in batch])
            for i in batch:
                state[i] = "RUNNING"
            scheduled.append(batch)
        if len(scheduled) == n_workers or (scheduled and not batch):
            for i in scheduled.pop(0):
                generated[i] += 1
                state[i] = "INCREMENT"
                if generated[i] == arrivals[i].num_generated:
                    n_rsrv -= max_tokens[i]
                    del state[i]
    return history


def run_scheduler(
    arrivals: Sequence[Arrival], n_workers: int, max_bs: int, n_slots: int, block_size: int
) -> list[list[tuple[int, int]]]:
    scheduler = make_scheduler(
        num_slots=n_slots, block_size=block_size, max_batch_size=max_bs, max_batch_tokens=None, num_workers=n_workers
    )
    in_flight: list[Iteration] = []
    history = []
    selections = 0
    while not scheduler.idle or selections <= max(a.at for a in arrivals):
        for arrival in arrivals:
            if arrival.at == selections:
                submit(scheduler, arrival.prompt_len, arrival.max_new_tokens)
        selections += 1
        iteration = scheduler.schedule()
        if iteration is not None:
            assert all(step.samples for step in iteration.steps)
            history.append([(step.request.request_id, step.length) for step in iteration.steps])
            in_flight.append(iteration)
        if len(in_flight) == n_workers or (in_flight and iteration is None):
            landed = in_flight.pop(0)
            scheduler.complete(landed)
            for request in (step.request for step in landed.steps):
                scheduler.append(request, [TOKEN])
                if len(request.generated) == arrivals[request.request_id].num_generated:
                    scheduler.finish(request)
    return history


@given(
    arrivals=st.lists(
        st.builds(
            Arrival,
            prompt_len=st.integers(1, 9),
            max_new_tokens=st.integers(1, 8),
            end_after=st.integers(1, 10),
            at=st.integers(0, 12),
        ),
        min_size=1,
        max_size=14,
    ).map(lambda arrivals: sorted(arrivals, key=lambda arrival: arrival.at)),
    n_workers=st.integers(1, 3),
    max_bs=st.integers(1, 5),
    num_blocks=st.integers(0, 24),
    block_size=st.sampled_from([1, 2, 8]),
)
@settings(max_examples=300, deadline=None)
def test_whole_prompt_mode_is_algorithm_1(
    arrivals: list[Arrival], n_workers: int, max_bs: int, num_blocks: int, block_size: int
) -> None:
    largest = max(arrival.prompt_len + arrival.max_new_tokens - 1 for arrival in arrivals)
    n_slots = -(-largest // block_size) * block_size + num_blocks * block_size
    expected = algorithm_1(arrivals, n_workers, max_bs, n_slots, block_size)
    assert run_scheduler(arrivals, n_workers, max_bs, n_slots, block_size) == expected
    assert Counter(i for batch in expected for i, _ in batch) == {
        i: arrival.num_generated for i, arrival in enumerate(arrivals)
    }
