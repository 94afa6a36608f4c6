"""Promise: whatever fails while requests are served, nobody hangs, the innocent go on, and all memory comes back."""

import asyncio
import gc
import threading

import pytest
import torch
from acting import Processor, Streamer
from oracle import SMALL
from tiny import PROMPTS, make_model
from transformers import LogitsProcessorList, StoppingCriteria

import orca_hf
from orca_hf import ForwardError, OrcaConfig, OrcaError, StoppedError
from orca_hf.engines import Engine
from orca_hf.runner import ModelRunner

WAIT = 60
GREEDY = {"max_new_tokens": 12, "do_sample": False}
OUT_OF_MEMORY = {
    "cuda": torch.OutOfMemoryError("CUDA out of memory"),
    "cpu": RuntimeError("[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory"),
}


@pytest.fixture(scope="module")
def expected():
    model = make_model()
    return [model.generate(torch.tensor([prompt]), **GREEDY)[0] for prompt in PROMPTS]


def make_engine(config=SMALL):
    return orca_hf.engine(make_model(), config)


def assert_whole(engine):
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_reserved, stats.num_used) == (0, 0, 0, 0)
    for core in engine._generate.engines:
        assert core.scheduler.faults() == []
        assert len(core._calls) == 0
        assert not core._calls.ended


def outcome(handle):
    try:
        return handle.result(WAIT)
    except Exception as error:
        return error


def forwards_that_fail(monkeypatch, fails, error):
    """Has the forward of each iteration fail for which `fails(iteration)`."""
    run = ModelRunner.run

    def failing(self, iteration, remaining=0):
        if fails(iteration):
            raise error
        return run(self, iteration, remaining)

    monkeypatch.setattr(ModelRunner, "run", failing)


def has_prompt(iteration, prompt):
    return any(step.request.prompt == prompt for step in iteration.steps)


@pytest.mark.parametrize("serves", [True, False], ids=["own thread", "callers drive"])
@pytest.mark.parametrize("guilty", [PROMPTS[:1], PROMPTS[1:2], PROMPTS[1:3], PROMPTS])
def test_a_failed_forward_fails_those_alone_who_fail_alone(monkeypatch, expected, serves, guilty):
    engine = make_engine()

    def fails(iteration):
        return any(has_prompt(iteration, prompt) for prompt in guilty) and len(engine.stats().recent) >= 3

    forwards_that_fail(monkeypatch, fails, ValueError("in the middle"))

    def results():
        handles = [engine.submit(prompt, **GREEDY) for prompt in PROMPTS]
        return [outcome(handle) for handle in handles], [handle.finish_reason for handle in handles]

    if serves:
        with engine.serving():
            rows, reasons = results()
    else:
        rows, reasons = results()
    for prompt, row, reason, native in zip(PROMPTS, rows, reasons, expected, strict=True):
        if prompt in guilty:
            assert isinstance(row, ForwardError)
            assert isinstance(row.__cause__, ValueError)
            assert "ValueError: in the middle" in str(row)
            assert reason == "error"
        else:
            assert torch.equal(row, native)
    assert engine.stats().num_failed == len(guilty)
    assert engine.is_healthy()
    assert_whole(engine)


def test_a_forward_that_fails_in_company_only_fails_nobody(monkeypatch, expected):
    engine = make_engine()
    forwards_that_fail(monkeypatch, lambda iteration: len(iteration.steps) > 1, ValueError("not together"))
    handles = [engine.submit(prompt, **GREEDY) for prompt in PROMPTS]
    for handle, native in zip(handles, expected, strict=True):
        assert torch.equal(handle.result(WAIT), native)
    assert_whole(engine)


@pytest.mark.parametrize("kind", OUT_OF_MEMORY)
def test_out_of_memory_halves_the_batch_and_fails_the_guilty_alone(monkeypatch, expected, kind):
    """One request's iterations always run out of memory; more than two at once do so too."""
    engine = make_engine(OrcaConfig(max_batch_size=8, max_batch_tokens=32, max_slots=512))
    sizes = []

    def fails(iteration):
        sizes.append(len(iteration.steps))
        return len(iteration.steps) > 2 or has_prompt(iteration, PROMPTS[2])

    forwards_that_fail(monkeypatch, fails, OUT_OF_MEMORY[kind])
    with engine.serving():
        handles = [engine.submit(prompt, **GREEDY) for prompt in PROMPTS]
        rows = [outcome(handle) for handle in handles]
    assert isinstance(rows[2], ForwardError)
    assert rows[2].__cause__ is OUT_OF_MEMORY[kind]
    for index in (0, 1, 3, 4):
        assert torch.equal(rows[index], expected[index])
    assert engine.stats().num_failed == 1
    assert_whole(engine)


def test_a_prompt_that_is_too_much_at_once_is_computed_in_smaller_pieces(monkeypatch, expected):
    engine = make_engine(OrcaConfig(max_batch_size=8, max_batch_tokens=32, max_slots=512))
    forwards_that_fail(monkeypatch, lambda iteration: iteration.num_tokens > 3, OUT_OF_MEMORY["cuda"])
    assert torch.equal(engine.submit(PROMPTS[0], **GREEDY).result(WAIT), expected[0])
    assert max(sum(share.num_tokens for share in record.shares) for record in engine.stats().recent) <= 3


def test_generate_goes_on_when_memory_is_short_for_all_its_rows_at_once(monkeypatch, expected):
    engine = make_engine(OrcaConfig(max_batch_size=8, max_batch_tokens=32, max_slots=512))
    forwards_that_fail(monkeypatch, lambda iteration: len(iteration.steps) > 1, OUT_OF_MEMORY["cuda"])
    rows = engine._generate.model.generate(torch.tensor([PROMPTS[2]] * 3), **GREEDY)
    assert all(torch.equal(row, expected[2]) for row in rows)


def test_iterations_grow_again_when_memory_is_back(monkeypatch):
    engine = make_engine(OrcaConfig(max_batch_size=8, max_batch_tokens=32, max_slots=2048))
    short = [True]
    forwards_that_fail(monkeypatch, lambda iteration: short[0] and iteration.num_tokens > 1, OUT_OF_MEMORY["cuda"])
    engine.submit(PROMPTS[1], **GREEDY).result(WAIT)
    scheduler = engine._generate.engines[0].scheduler
    assert (scheduler.max_batch_size, scheduler.max_batch_tokens) == (1, 1)
    short[0] = False
    handles = [engine.submit(prompt, max_new_tokens=100, do_sample=False) for prompt in PROMPTS]
    for handle in handles:
        handle.result(WAIT)
    assert (scheduler.max_batch_size, scheduler.max_batch_tokens) == (8, 32)


def dying(monkeypatch, error, num_calls):
    """Has the engine itself fail, at its third iteration, in whichever thread drives, when so many calls have come."""
    iterations, calls, all_there = [], [], threading.Event()
    run, submit = Engine._run_one_iteration, Engine.submit

    def counted(self, generation, **options):
        submit(self, generation, **options)
        calls.append(generation)
        if len(calls) == num_calls:
            all_there.set()

    def broken(self):
        iterations.append(self)
        if len(iterations) == 3:
            assert num_calls == 0 or all_there.wait(WAIT)
            raise error
        run(self)

    monkeypatch.setattr(Engine, "submit", counted)
    monkeypatch.setattr(Engine, "_run_one_iteration", broken)


@pytest.mark.parametrize("error", [RuntimeError("a defect"), SystemExit(), KeyboardInterrupt()], ids=type)
def test_a_driving_thread_that_dies_is_seen_by_every_waiter(monkeypatch, expected, error):
    engine = make_engine()
    results = []

    async def wait_for_all(handles):
        return await asyncio.wait_for(asyncio.gather(*handles, return_exceptions=True), WAIT)

    dying(monkeypatch, error, num_calls=3)
    with engine.serving():
        handles = [engine.submit(prompt, **GREEDY) for prompt in PROMPTS[:3]]
        threads = [
            threading.Thread(target=lambda handle=handle: results.append(outcome(handle)), daemon=True)
            for handle in handles
        ]
        for thread in threads:
            thread.start()
        awaited = asyncio.run(wait_for_all(handles))
        for thread in threads:
            thread.join(WAIT)
        assert len(results) == 3
        for result in [*results, *awaited]:
            assert isinstance(result, StoppedError)
            assert result.__cause__ is error
        assert not engine.is_healthy()
        assert not engine.stats().is_healthy
        with pytest.raises(StoppedError, match="died"):
            engine.submit(PROMPTS[0], **GREEDY)
        native = engine._generate.model.generate(torch.tensor([PROMPTS[0]]), **GREEDY)[0]
        assert torch.equal(native, expected[0]), "generate() drives by itself"
    assert_whole(engine)
    with engine.serving():
        assert engine.is_healthy()
        assert torch.equal(engine.submit(PROMPTS[0], **GREEDY).result(WAIT), expected[0])


def test_a_generate_call_takes_over_from_a_driving_thread_that_dies(monkeypatch, expected):
    engine = make_engine()
    dying(monkeypatch, RuntimeError("a defect"), num_calls=2)
    with engine.serving():
        handle = engine.submit(PROMPTS[2], **GREEDY)
        next(iter(handle))  # the thread drives, and now waits for the second call
        row = engine._generate.model.generate(torch.tensor([PROMPTS[1]]), **GREEDY)[0]
        assert torch.equal(row, expected[1])
        assert isinstance(outcome(handle), StoppedError)
    assert_whole(engine)


def fail(error):
    raise error


CALLBACKS = {
    "a processor": lambda act: {"logits_processor": LogitsProcessorList([Processor(act)])},
    "a streamer's put": lambda act: {"streamer": Streamer(in_put=act, at=3)},
    "a streamer's end": lambda act: {"streamer": Streamer(in_end=act)},
}


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("place", CALLBACKS)
def test_a_users_error_ends_its_request_and_no_other(expected, place, error):
    engine = make_engine()
    with engine.serving():
        good = engine.submit(PROMPTS[0], **GREEDY)
        bad = engine.submit(PROMPTS[1], **GREEDY, **CALLBACKS[place](lambda: fail(error("the user's"))))
        with pytest.raises(error, match="the user's"):
            bad.result(WAIT)
        assert bad.finish_reason == "error"
        assert torch.equal(good.result(WAIT), expected[0])
        assert engine.is_healthy()
    assert_whole(engine)


@pytest.mark.parametrize("place", ["a processor", "a criterion"])
def test_a_users_error_in_a_native_request_is_its_result(expected, place):
    engine = make_engine()

    class Criterion(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            raise ZeroDivisionError("the user's")

    more = {
        "a processor": {"logits_processor": LogitsProcessorList([Processor(lambda: fail(ZeroDivisionError()), at=1)])},
        "a criterion": {"stopping_criteria": [Criterion()]},
    }[place]
    with pytest.raises(ZeroDivisionError):
        engine.submit(PROMPTS[0], **GREEDY, num_beams=2, **more).result(WAIT)
    assert torch.equal(engine.submit(PROMPTS[0], **GREEDY).result(WAIT), expected[0])
    assert_whole(engine)


def test_a_request_that_waits_for_itself_is_an_error_and_no_deadlock(expected):
    engine = make_engine()
    handles = []
    act = CALLBACKS["a processor"](lambda: handles[0].result(WAIT))
    handles.append(engine.submit(PROMPTS[0], **GREEDY, **act))
    with pytest.raises(OrcaError, match="waited for inside"):
        handles[0].result(WAIT)
    assert torch.equal(engine.submit(PROMPTS[0], **GREEDY).result(WAIT), expected[0])
    assert_whole(engine)


def test_a_request_submitted_inside_a_callback_is_served(expected):
    engine = make_engine()
    inner = []
    act = CALLBACKS["a processor"](lambda: inner.append(engine.submit(PROMPTS[1], **GREEDY).result(WAIT)))
    assert torch.equal(engine.submit(PROMPTS[0], **GREEDY, **act).result(WAIT), expected[0])
    assert torch.equal(inner[0], expected[1])
    assert_whole(engine)


def test_an_interrupted_reader_leaves_its_request_and_others_to_the_next(monkeypatch, expected):
    engine = make_engine()
    handles = [engine.submit(prompt, **GREEDY) for prompt in PROMPTS[:3]]
    with monkeypatch.context() as patch:
        dying(patch, KeyboardInterrupt(), num_calls=0)
        with pytest.raises(KeyboardInterrupt):
            handles[0].result(WAIT)
    for handle, native in zip(handles, expected, strict=False):
        assert torch.equal(handle.result(WAIT), native)
    assert_whole(engine)


def test_a_reader_whose_loop_is_gone_stalls_nobody(expected):
    engine = make_engine()
    parked, go_on = threading.Event(), threading.Event()

    def park():
        parked.set()
        assert go_on.wait(WAIT)

    async def begin(handle):
        task = asyncio.ensure_future(anext(aiter(handle)))
        await asyncio.sleep(0)
        return task

    with engine.serving():
        gate = engine.submit(PROMPTS[0], **GREEDY, **CALLBACKS["a processor"](park))
        assert parked.wait(WAIT)
        left = engine.submit(PROMPTS[1], **GREEDY)
        asyncio.run(begin(left))
        go_on.set()
        assert torch.equal(gate.result(WAIT), expected[0])
        assert torch.equal(left.result(WAIT), expected[1])
    assert_whole(engine)


def test_readers_that_never_read_stall_nobody(expected):
    engine = make_engine()
    unread = [engine.submit(PROMPTS[0], max_new_tokens=100) for _ in range(3)]
    assert torch.equal(engine.submit(PROMPTS[1], **GREEDY).result(WAIT), expected[1])
    del unread
    gc.collect()
    assert engine.drain(WAIT)
    assert_whole(engine)


def test_a_ledger_that_contradicts_itself_is_begun_anew(monkeypatch, expected, caplog):
    engine = make_engine()
    core = engine._generate.engines[0]
    handles = [engine.submit(prompt, **GREEDY) for prompt in PROMPTS[:2]]
    lost = []

    def leak(iteration):
        if len(engine.stats().recent) == 2 and not lost:
            lost.append(core.scheduler.kv_manager._allocator.allocate(1))
            return True
        return False

    forwards_that_fail(monkeypatch, leak, ValueError("and a slot is lost"))
    for handle, native in zip(handles, expected, strict=False):
        assert torch.equal(handle.result(WAIT), native)
    assert "contradicts itself" in caplog.text
    assert_whole(engine)
