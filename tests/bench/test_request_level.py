"""Promise: under request-level scheduling nobody joins or leaves a running batch, and its answers come together."""

import random

import pytest
import torch
from joined import joined_calls
from scheduler_driver import TOKEN, ids, land, schedule, spans, submit
from tiny import make_model

from orca_hf.bench.request_level import RequestLevelGenerate, RequestLevelScheduler
from orca_hf.config import OrcaConfig
from orca_hf.kv_manager import KVManager
from orca_hf.scheduler import Scheduler


def make(kind=RequestLevelScheduler, *, num_slots=64, max_batch_size=4):
    return kind(KVManager(num_slots, 1), max_batch_size=max_batch_size)


def test_whoever_comes_while_a_batch_runs_waits_for_its_end():
    ran = {}
    for kind in (Scheduler, RequestLevelScheduler):
        scheduler = make(kind)
        submit(scheduler, 3, 1)
        submit(scheduler, 3, 3)
        batches = []
        land(scheduler, first := schedule(scheduler))
        batches.append(ids(first))
        submit(scheduler, 3, 2)  # comes when request 0 has just ended, and there is room
        while not scheduler.idle:
            iteration = schedule(scheduler)
            batches.append(ids(iteration))
            land(scheduler, iteration)
        ran[kind] = batches
    assert ran[Scheduler] == [[0, 1], [1, 2], [1, 2]]
    assert ran[RequestLevelScheduler] == [[0, 1], [0, 1], [0, 1], [2], [2]]


def test_a_row_that_has_ended_is_computed_along_and_holds_its_slots_to_the_end_of_the_batch():
    scheduler = make()
    short, long = submit(scheduler, 3, 2), submit(scheduler, 4, 4)
    ran = []
    while not scheduler.idle:
        iteration = schedule(scheduler)
        ran.append(spans(iteration))
        land(scheduler, iteration)
        assert scheduler.kv_manager.num_reserved in (0, short.max_slots + long.max_slots)
        assert not scheduler.faults()
    # Its last token has no slot, as nobody reads its K/V: the one before it is computed once more.
    assert ran == ["0:0+3! 1:0+4!", "0:3+1! 1:4+1!", "0:3+1 1:5+1!", "0:3+1 1:6+1!"]
    assert short.generated == [TOKEN] * 2 and long.generated == [TOKEN] * 4


@pytest.mark.parametrize("in_flight", [False, True])
def test_who_has_ended_goes_when_the_last_of_the_others_is_cancelled(in_flight):
    scheduler = make()
    short, long = submit(scheduler, 3, 1), submit(scheduler, 4, 4)
    land(scheduler, schedule(scheduler))
    iteration = schedule(scheduler) if in_flight else None
    scheduler.cancel(long)
    if iteration is not None:
        land(scheduler, iteration)
    assert scheduler.idle and short.finished and long.finished
    assert scheduler.kv_manager.num_reserved == 0


def test_a_batch_is_as_large_as_slots_and_size_allow():
    scheduler = make(num_slots=20, max_batch_size=3)
    for _ in range(4):
        submit(scheduler, 5, 4)  # 8 slots each
    assert ids(schedule(scheduler)) == [0, 1]
    scheduler = make(num_slots=64, max_batch_size=3)
    for _ in range(4):
        submit(scheduler, 5, 4)
    assert ids(schedule(scheduler)) == [0, 1, 2]


def test_a_cancelled_batch_makes_room_for_the_next():
    scheduler = make()
    first, second = submit(scheduler, 3, 2), submit(scheduler, 3, 9)
    land(scheduler, schedule(scheduler))
    third = submit(scheduler, 3, 1)
    scheduler.cancel(second)
    assert ids(schedule(scheduler)) == [first.request_id]
    scheduler = make()
    first = submit(scheduler, 3, 2)
    land(scheduler, schedule(scheduler))
    third = submit(scheduler, 3, 1)
    scheduler.cancel(first)
    assert ids(schedule(scheduler)) == [third.request_id]


@pytest.mark.parametrize("seed", range(20))
def test_no_batch_ever_has_a_member_that_its_first_iteration_had_not(seed):
    rng = random.Random(seed)
    scheduler = make(num_slots=60, max_batch_size=rng.randint(1, 6))
    unfinished, order, members = [], [], set()
    for _ in range(120):
        for _ in range(rng.choice((0, 0, 1, 3))):
            unfinished.append(submit(scheduler, rng.randint(1, 9), rng.randint(1, 9)))
        if unfinished and rng.random() < 0.1:
            scheduler.cancel(rng.choice(unfinished))
        unfinished = [request for request in unfinished if not request.finished]
        running = members & {request.request_id for request in unfinished}
        iteration = scheduler.schedule()
        assert (iteration is None) == (not unfinished)
        if iteration is None:
            continue
        if running:
            assert set(ids(iteration)) == running, "all that is left of the batch, and nobody else"
        else:
            members = set(ids(iteration))
            order += ids(iteration)
        land(scheduler, iteration)
        assert not scheduler.faults()
    assert order == sorted(order), "first come, first served"
    assert len(order) > 10


class Ends:
    """A streamer that notes when the last token of a row comes, and when its answer does."""

    def __init__(self, name, num_tokens, seen):
        self.name, self.left, self.seen = name, 1 + num_tokens, seen  # the prompt comes first

    def put(self, value):
        self.left -= 1
        if self.left == 0:
            self.seen.append(f"last token of {self.name}")

    def end(self):
        self.seen.append(f"answer of {self.name}")


def test_answers_are_native_and_come_when_the_longest_is_done():
    model = make_model("llama")
    native = model.generate
    model.generate = RequestLevelGenerate(model, OrcaConfig(max_slots=256, max_batch_tokens=None))
    seen = []
    calls = []
    for name, num_tokens in (("short", 2), ("long", 12)):
        call = {"input_ids": torch.tensor([[5, 6, num_tokens]]), "max_new_tokens": num_tokens, "do_sample": False}
        calls.append({**call, "eos_token_id": None, "streamer": Ends(name, num_tokens, seen)})
    model.generate(torch.tensor([[5]]), max_new_tokens=1)  # the engine is there from here on
    answers = joined_calls(model, calls)
    for answer, call in zip(answers[1:], calls, strict=True):
        assert torch.equal(answer, native(**{**call, "streamer": None}))
    assert seen[:2] == ["last token of short", "last token of long"]
    assert sorted(seen[2:]) == ["answer of long", "answer of short"]
    assert model.generate.engines[0].idle
