"""Promise: a submitted request gives what native generate() gives for it alone, whoever shares its iterations."""

import asyncio
import gc
import threading
from functools import cache

import pytest
import torch
from oracle import SMALL
from tiny import PROMPTS, make_model
from tokenizers import Tokenizer, decoders, models
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
)

import orca_hf
from orca_hf import CancelledError, CapacityError, DeadlineError, OrcaConfig, RequestError, StoppedError, TokenIdError

WAIT = 60
GREEDY = {"max_new_tokens": 9, "do_sample": False}
SAMPLED = {"max_new_tokens": 9, "do_sample": True, "temperature": 1.4, "top_k": 20}


def native(prompt, seed=0, **options):
    model = make_model()
    torch.manual_seed(seed)
    return model.generate(torch.tensor([prompt]), **options)[0]


def make_engine(config=SMALL, **overrides):
    return orca_hf.engine(make_model(**overrides), config)


def assert_idle(engine):
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_reserved, stats.num_used) == (0, 0, 0, 0)


class Doubling(LogitsProcessor):
    """A user's own; draws random numbers too, as native's draws then have to follow."""

    def __call__(self, input_ids, scores):
        return scores * (1 + torch.rand(1))


class StopsAt(StoppingCriteria):
    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


def letters():
    """A tokenizer whose tokens are letters of their own."""
    vocab = {chr(97 + token % 26) * (1 + token // 26): token for token in range(97)}
    backend = Tokenizer(models.BPE(vocab, []))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@cache
def stop_string():
    """What comes in the middle of the greedy answer to the first prompt."""
    return letters().decode(native(PROMPTS[0], **GREEDY)[len(PROMPTS[0]) + 4])


CASES = {
    "greedy": lambda: GREEDY,
    "sampled": lambda: SAMPLED,
    "sampled, typical": lambda: {**SAMPLED, "typical_p": 0.7},
    "penalties": lambda: {**GREEDY, "repetition_penalty": 1.7, "no_repeat_ngram_size": 2},
    "EOS": lambda: {**GREEDY, "max_new_tokens": 40, "eos_token_id": list(range(3, 40))},
    "stop string": lambda: {**GREEDY, "stop_strings": [stop_string()], "tokenizer": letters()},
    "a processor that draws": lambda: {**SAMPLED, "logits_processor": LogitsProcessorList([Doubling()])},
    "a greedy one that draws": lambda: {**GREEDY, "logits_processor": LogitsProcessorList([Doubling()])},
    "a criterion": lambda: {**GREEDY, "stopping_criteria": StoppingCriteriaList([StopsAt(14)])},
    "a configuration": lambda: {"generation_config": GenerationConfig(max_new_tokens=5, do_sample=False)},
    "returned dict": lambda: {**GREEDY, "return_dict_in_generate": True, "output_scores": True},
    "beams": lambda: {**GREEDY, "num_beams": 3},
    "sampled beams": lambda: {**SAMPLED, "num_beams": 2},
    "prompt lookup": lambda: {**GREEDY, "prompt_lookup_num_tokens": 2},
}
NATIVE = {"beams", "sampled beams", "prompt lookup"}


def expected_row(name, prompt, seed):
    model = make_model()
    torch.manual_seed(seed)
    output = model.generate(torch.tensor([prompt]), **CASES[name]())
    return (output if isinstance(output, torch.Tensor) else output.sequences)[0]


@pytest.mark.parametrize("serves", [True, False], ids=["own thread", "callers drive"])
@pytest.mark.parametrize("name", CASES)
def test_a_request_among_others_is_native_alone(name, serves):
    expected = [expected_row(name, prompt, seed) for seed, prompt in enumerate(PROMPTS)]
    engine = make_engine()
    torch.manual_seed(99)
    state = torch.get_rng_state()

    def submit_all():
        handles = []
        for seed, prompt in enumerate(PROMPTS):
            handles.append(engine.submit(prompt, seed=seed, **CASES[name]()))
            handles.append(engine.submit(prompt, seed=seed + 50, **SAMPLED))
        return handles[::2]

    if serves:
        with engine.serving():
            results = [handle.result(WAIT) for handle in submit_all()]
    else:
        results = [handle.result(WAIT) for handle in submit_all()]
    assert all(torch.equal(ours, row) for ours, row in zip(results, expected, strict=True))
    assert results[0].dtype == torch.long
    assert torch.equal(torch.get_rng_state(), state), "seeded requests leave the default generator alone"
    assert engine.stats().num_native == (len(PROMPTS) if name in NATIVE else 0)
    if not serves:
        while engine.stats().num_running + engine.stats().num_waiting:
            engine.drain(WAIT)
    assert_idle(engine)


@pytest.mark.parametrize("prompt", [PROMPTS[0], torch.tensor(PROMPTS[0]), torch.tensor([PROMPTS[0]])], ids=type)
def test_a_prompt_is_a_list_or_a_row(prompt):
    assert torch.equal(make_engine().submit(prompt, **GREEDY).result(WAIT), native(PROMPTS[0], **GREEDY))


REFUSED = {
    "no tokens": ([], {}, RequestError, "has no tokens"),
    "two rows": (torch.tensor([[1], [2]]), {}, RequestError, "one row"),
    "floats": (torch.tensor([1.5]), {}, RequestError, "float32"),
    "words": (["a"], {}, RequestError, "integers"),
    "an unknown token": ([5, 4000], {}, TokenIdError, "4000"),
    "too long for the memory": ([5] * 100, {"max_new_tokens": 28}, CapacityError, "the pool has 64"),
    "several answers": ([5], {"do_sample": True, "num_return_sequences": 2}, RequestError, "num_return_sequences"),
    "an unknown option": ([5], {"no_such_option": 1}, ValueError, "no_such_option"),
    "a wrong option": ([5], {"temperature": -1.0, "do_sample": True}, ValueError, "temperature"),
    "beams with a streamer": ([5], {"num_beams": 2, "streamer": "yes"}, ValueError, "streamer"),
    "stop strings without a tokenizer": ([5], {"stop_strings": ["a"]}, ValueError, "tokenizer"),
    "a seed": ([5], {"seed": "x"}, RequestError, "seed"),
    "a deadline": ([5], {"deadline": float("nan")}, RequestError, "deadline"),
    "logprobs": ([5], {"logprobs": -1}, RequestError, "logprobs"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_generate_refuses_is_refused_at_once(name):
    prompt, options, error, words = REFUSED[name]
    engine = make_engine(OrcaConfig(max_batch_size=3, max_batch_tokens=7, max_slots=64))
    with pytest.raises(error, match=words):
        engine.submit(prompt, **{"max_new_tokens": 3, **options})
    assert_idle(engine)
    assert engine.stats().num_failed == 0
    assert torch.equal(engine.submit(PROMPTS[1], **GREEDY).result(WAIT), native(PROMPTS[1], **GREEDY))


@pytest.mark.parametrize("options", [GREEDY, {**GREEDY, "num_beams": 2}], ids=["orca", "native"])
def test_tokens_come_one_by_one_to_several_readers(options):
    expected = native(PROMPTS[0], **options)[len(PROMPTS[0]) :].tolist()
    engine = make_engine()
    handle = engine.submit(PROMPTS[0], **options)
    first, second = iter(handle), iter(handle)
    mixed = [next(first), next(second), next(second), *first]
    assert mixed == [expected[0], expected[0], expected[1], *expected[1:]]
    assert list(handle) == handle.token_ids == expected
    assert handle.done()


def test_a_token_is_there_before_the_end():
    engine = make_engine()
    handle = engine.submit(PROMPTS[0], **GREEDY)
    assert next(iter(handle)) == handle.token_ids[0]
    assert len(handle.token_ids) == 1
    assert not handle.done()
    assert handle.finish_reason is None
    assert handle.timings.arrival <= handle.timings.first_token
    assert handle.timings.end is None
    handle.result(WAIT)
    assert handle.timings.first_token < handle.timings.end


class Heard:
    def __init__(self):
        self.values, self.ends = [], 0

    def put(self, value):
        self.values.append(value.tolist())

    def end(self):
        self.ends += 1


@pytest.mark.parametrize("model_type", ["llama", "mamba"], ids=["orca", "native"])
def test_a_streamer_hears_what_it_hears_natively(model_type):
    ours, theirs = Heard(), Heard()
    options = {**GREEDY, "streamer": theirs}
    make_model(model_type).generate(torch.tensor([PROMPTS[0]]), **options)
    engine = make_engine(model_type=model_type)
    handle = engine.submit(PROMPTS[0], **{**options, "streamer": ours})
    tokens = list(handle)
    assert (ours.values, ours.ends) == (theirs.values, theirs.ends) == (theirs.values, 1)
    assert [[token] for token in tokens] == ours.values[1:]
    assert engine.stats().num_native == (model_type == "mamba")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (GREEDY, "length"),
        (CASES["EOS"](), "stop"),
        ({**GREEDY, "num_beams": 2}, "length"),
        ({**GREEDY, "num_beams": 2, "eos_token_id": list(range(3, 60))}, "stop"),
        ({**GREEDY, "stopping_criteria": StoppingCriteriaList([StopsAt(14)])}, "stop"),
    ],
)
def test_why_a_request_ended(options, reason):
    handle = make_engine().submit(PROMPTS[0], **options)
    handle.result(WAIT)
    assert handle.finish_reason == reason


def test_a_stop_at_the_last_possible_token_is_a_stop():
    row = native(PROMPTS[0], **GREEDY)
    engine = make_engine()
    handle = engine.submit(PROMPTS[0], **GREEDY, eos_token_id=int(row[-1]))
    last = row.tolist().index(int(row[-1]), len(PROMPTS[0])) + 1
    assert torch.equal(handle.result(WAIT), row[:last])
    assert handle.finish_reason == "stop"
    word = letters().decode(row[-1])
    handle = engine.submit(PROMPTS[0], **GREEDY, stop_strings=[word], tokenizer=letters())
    handle.result(WAIT)
    assert handle.finish_reason == "stop"


@pytest.mark.parametrize("more", [{}, SAMPLED, {"num_beams": 2}, {"repetition_penalty": 2.0}], ids=str)
def test_logprobs_are_those_of_a_native_forward(more):
    options = {**GREEDY, **more}
    model = make_model()
    handle = make_engine().submit(PROMPTS[0], seed=3, logprobs=4, **options)
    row = handle.result(WAIT)
    with torch.no_grad():
        logprobs = torch.log_softmax(model(row[None]).logits[0], dim=-1)
    start = len(PROMPTS[0])
    assert len(handle.logprobs) == len(row) - start == len(handle.token_ids)
    for place, found in enumerate(handle.logprobs, start):
        there = logprobs[place - 1]
        assert found.logprob == pytest.approx(there[row[place]].item(), abs=1e-4)
        values, ids = there.topk(4)
        assert [token for token, _ in found.top] == ids.tolist()
        assert [value for _, value in found.top] == pytest.approx(values.tolist(), abs=1e-4)


@pytest.mark.parametrize("k", [0, 3, 1000])
def test_prompt_logprobs_are_those_of_a_native_forward(k):
    model = make_model()
    first, *others = make_engine().prompt_logprobs(PROMPTS[0], k)
    assert first is None
    with torch.no_grad():
        logprobs = torch.log_softmax(model(torch.tensor([PROMPTS[0]])).logits[0], dim=-1)
    assert len(others) == len(PROMPTS[0]) - 1
    for place, found in enumerate(others, 1):
        assert found.logprob == pytest.approx(logprobs[place - 1, PROMPTS[0][place]].item(), abs=1e-4)
        assert len(found.top) == min(k, logprobs.shape[1])
        if k:
            assert found.top[0][0] == int(logprobs[place - 1].argmax())


@pytest.mark.parametrize("serves", [True, False], ids=["own thread", "on demand"])
def test_an_event_loop_reads_without_blocking(serves):
    expected = [native(prompt, **GREEDY) for prompt in PROMPTS]
    engine = make_engine()
    before = threading.active_count()
    most = []

    async def read(handle):
        tokens = []
        async for token in handle:
            tokens.append(token)
            most.append(threading.active_count())
        return tokens

    async def main():
        handles = [engine.submit(prompt, **GREEDY) for prompt in PROMPTS]
        tokens = await asyncio.wait_for(asyncio.gather(*map(read, handles)), WAIT)
        rows = [await handle for handle in handles]
        return tokens, rows

    if serves:
        with engine.serving():
            tokens, rows = asyncio.run(main())
    else:
        tokens, rows = asyncio.run(main())
    assert all(torch.equal(row, native_row) for row, native_row in zip(rows, expected, strict=True))
    assert tokens == [row[len(prompt) :].tolist() for row, prompt in zip(expected, PROMPTS, strict=True)]
    assert max(most) <= before + 1, "one thread for all requests"


def test_a_task_that_is_cancelled_leaves_its_request_to_others():
    engine = make_engine()

    async def main():
        handle = engine.submit(PROMPTS[0], **GREEDY)
        task = asyncio.ensure_future(asyncio.wait_for(handle, WAIT))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await asyncio.wait_for(handle, WAIT)

    with engine.serving():
        assert torch.equal(asyncio.run(main()), native(PROMPTS[0], **GREEDY))


def test_a_request_is_cancelled_before_it_starts_midway_and_after_its_end():
    engine = make_engine()
    never, midway, ended, other = (engine.submit(prompt, **GREEDY) for prompt in PROMPTS[:4])
    never.cancel()
    assert never.done()
    next(iter(midway))
    midway.cancel()
    midway.cancel()
    ended.result(WAIT)
    ended.cancel()
    for handle in (never, midway):
        with pytest.raises(CancelledError):
            handle.result(WAIT)
        with pytest.raises(CancelledError):
            list(handle)
        assert handle.finish_reason == "cancelled"
    assert torch.equal(ended.result(), native(PROMPTS[2], **GREEDY))
    assert torch.equal(other.result(WAIT), native(PROMPTS[3], **GREEDY))
    stats = engine.stats()
    assert (stats.num_finished, stats.num_cancelled, stats.num_failed) == (2, 2, 0)
    assert_idle(engine)


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}], ids=["orca", "native"])
def test_a_request_is_cancelled_while_it_runs(options):
    engine = make_engine()
    there, go_on = threading.Event(), threading.Event()

    class Parks(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            there.set()
            assert go_on.wait(WAIT)
            return torch.zeros(len(input_ids), dtype=torch.bool)

    with engine.serving():
        handle = engine.submit(PROMPTS[0], max_new_tokens=90, **options, stopping_criteria=[Parks()])
        assert there.wait(WAIT)
        handle.cancel()
        go_on.set()
        with pytest.raises(CancelledError):
            handle.result(WAIT)
        assert torch.equal(engine.submit(PROMPTS[1], **GREEDY).result(WAIT), native(PROMPTS[1], **GREEDY))
    assert len(handle.token_ids) <= 1
    assert_idle(engine)


@pytest.mark.parametrize("serves", [True, False])
def test_a_handle_that_is_dropped_cancels_its_request(serves):
    engine = make_engine()

    def drop_one():
        handle = engine.submit(PROMPTS[0], max_new_tokens=100)
        next(iter(handle))
        del handle
        gc.collect()
        return engine.submit(PROMPTS[1], **GREEDY).result(WAIT)

    if serves:
        with engine.serving():
            result = drop_one()
    else:
        result = drop_one()
    assert torch.equal(result, native(PROMPTS[1], **GREEDY))
    assert engine.stats().num_cancelled == 1
    assert_idle(engine)


def test_a_dropped_handle_with_a_streamer_goes_on():
    engine, streamer = make_engine(), Heard()
    engine.submit(PROMPTS[0], **GREEDY, streamer=streamer)
    gc.collect()
    assert engine.drain(WAIT)
    assert len(streamer.values) == 1 + GREEDY["max_new_tokens"]
    assert streamer.ends == 1


def test_a_result_that_is_not_there_in_time_comes_later():
    engine = make_engine()
    handle = engine.submit(PROMPTS[0], **GREEDY)
    with pytest.raises(TimeoutError):
        handle.result(timeout=0)
    assert not handle.done()
    assert torch.equal(handle.result(WAIT), native(PROMPTS[0], **GREEDY))


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}], ids=["orca", "native"])
def test_a_deadline_ends_a_request_and_no_other(options):
    engine = make_engine()
    late = engine.submit(PROMPTS[0], **GREEDY, **options, deadline=0)
    in_time = engine.submit(PROMPTS[1], **GREEDY, **options, deadline=1e6)
    with pytest.raises(DeadlineError):
        late.result(WAIT)
    assert late.finish_reason == "deadline"
    assert torch.equal(in_time.result(WAIT), native(PROMPTS[1], **GREEDY, **options))
    assert engine.stats().num_cancelled == 1
    engine.drain(WAIT)
    assert_idle(engine)


def test_generate_calls_share_iterations_with_submitted_requests():
    engine = make_engine()
    model = engine._generate.model
    handles = [engine.submit(prompt, max_new_tokens=20, do_sample=False) for prompt in PROMPTS[:2]]
    ours = model.generate(torch.tensor([PROMPTS[2]]), **GREEDY)[0]
    rows = [handle.result(WAIT) for handle in handles]
    assert torch.equal(ours, native(PROMPTS[2], **GREEDY))
    assert all(
        torch.equal(row, native(prompt, max_new_tokens=20, do_sample=False))
        for row, prompt in zip(rows, PROMPTS, strict=False)
    )
    together = [{share.request_id for share in record.shares} for record in engine.stats().recent]
    submitted = {handle.request_id for handle in handles}
    assert any(len(ids) == 3 and submitted < ids for ids in together)
    assert_idle(engine)


def test_the_history_says_what_each_iteration_computed():
    engine = make_engine()
    handle = engine.submit(PROMPTS[0], max_new_tokens=4, do_sample=False)
    handle.result(WAIT)
    recent = engine.stats().recent
    shares = [share for record in recent for share in record.shares]
    assert [(share.kind, share.num_tokens) for share in shares] == [
        ("prefill", 7),
        ("prefill", 4),
        *[("decode", 1)] * 3,
    ]
    assert {share.request_id for share in shares} == {handle.request_id}
    starts = [record.started for record in recent]
    assert starts == sorted(starts)
    assert all(record.duration >= 0 for record in recent)
    stats = engine.stats()
    assert (stats.num_iterations, stats.num_prompt_tokens, stats.num_generated_tokens) == (5, len(PROMPTS[0]), 4)


def test_drain_finishes_what_is_there_and_takes_no_more():
    engine = make_engine()
    handles = [engine.submit(prompt, **GREEDY) for prompt in PROMPTS]
    assert engine.drain()
    assert all(handle.done() and handle.finish_reason == "length" for handle in handles)
    assert not engine.stats().is_accepting
    with pytest.raises(StoppedError):
        engine.submit(PROMPTS[0], **GREEDY)
    with engine.serving():
        assert torch.equal(engine.submit(PROMPTS[0], **GREEDY).result(WAIT), native(PROMPTS[0], **GREEDY))


def test_drain_cancels_what_is_not_done_in_time():
    engine = make_engine()
    handles = [engine.submit(prompt, **GREEDY) for prompt in PROMPTS]
    assert not engine.drain(timeout=0)
    for handle in handles:
        with pytest.raises(CancelledError):
            handle.result(WAIT)
    assert_idle(engine)


def test_the_thread_is_there_while_serving_and_finishes_what_was_submitted():
    engine = make_engine()
    before = set(threading.enumerate())
    with engine.serving():
        handles = [engine.submit(prompt, **GREEDY) for prompt in PROMPTS]
        assert len(set(threading.enumerate()) - before) == 1
    assert set(threading.enumerate()) == before
    assert all(torch.equal(handle.result(0), native(p, **GREEDY)) for handle, p in zip(handles, PROMPTS, strict=True))


def test_an_error_in_the_block_cancels_what_was_submitted():
    engine = make_engine()
    before = set(threading.enumerate())
    with pytest.raises(ZeroDivisionError), engine.serving():
        handle = engine.submit(PROMPTS[0], max_new_tokens=110)
        raise ZeroDivisionError
    assert handle.done()
    assert set(threading.enumerate()) == before
    assert_idle(engine)


def test_requests_without_a_seed_follow_the_default_generator_in_order():
    def answers():
        engine = make_engine()
        torch.manual_seed(5)
        handles = [engine.submit(prompt, **SAMPLED) for prompt in [PROMPTS[0]] * 3]
        return [handle.result(WAIT).tolist() for handle in reversed(handles)]

    first, second = answers(), answers()
    assert first == second
    assert len({tuple(row) for row in first}) > 1


def test_what_a_model_does_not_support_in_the_middle_runs_natively(monkeypatch):
    engine, streamer = make_engine(), Heard()
    expected = native(PROMPTS[0], **GREEDY)

    def refuse(self, iteration, remaining=0):
        raise orca_hf.errors.UnsupportedError("not today")

    monkeypatch.setattr("orca_hf.runner.ModelRunner.run", refuse)
    with engine.serving():
        plain = engine.submit(PROMPTS[0], **GREEDY, logprobs=1)
        streamed = engine.submit(PROMPTS[0], **GREEDY, streamer=streamer)
        assert torch.equal(plain.result(WAIT), expected)
        assert torch.equal(streamed.result(WAIT), expected)
    assert streamer.values == [[PROMPTS[0]], *[[token] for token in expected[len(PROMPTS[0]) :].tolist()]]
    assert streamer.ends == 1
    assert len(plain.logprobs) == GREEDY["max_new_tokens"]
    assert engine.stats().num_native == 2
    assert_idle(engine)
