"""Promise: guessing at the next tokens changes none of them, only how many come from an iteration."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from joined import joined_calls
from oracle import assert_same, make_twins, num_iterations
from scheduler_driver import make_scheduler
from tiny import PROMPTS, make_model, pad_left
from transformers.generation.streamers import BaseStreamer

import orca_hf
from orca_hf import OrcaConfig
from orca_hf.request import Request
from orca_hf.scheduler import Iteration, Scheduler, Step
from orca_hf.speculation import Speculation

CIRCLES = [[5, 6, 7] * 4, [9, 9, 9, 9, 9], [1, 2, 3, 4, 1, 2, 3], [11, 12]]
OPTIONS = {
    "greedy": {"max_new_tokens": 40},
    "one token": {"max_new_tokens": 1},
    "ends": {"max_new_tokens": 40, "eos_token_id": list(range(3, 20))},
    "rows of a sampled call, in step, guess nothing": {"max_new_tokens": 12, "do_sample": True},
    "with a processor": {"max_new_tokens": 40, "repetition_penalty": 1.01},
    "with one that hates what repeats": {"max_new_tokens": 12, "no_repeat_ngram_size": 2},
}


def made(prompts=CIRCLES, **options):
    return {"do_sample": False, **pad_left(prompts), **options}


@pytest.mark.parametrize("num_tokens", [1, 3, 7])
@pytest.mark.parametrize("model_type", ["llama", "mistral", "gemma2", "bloom", "gpt2"])
def test_rows_are_natives(model_type, num_tokens):
    config = OrcaConfig(max_batch_size=3, max_batch_tokens=9, block_size=4, num_speculative_tokens=num_tokens)
    native, ours = make_twins(config, model_type)
    for prompts in (CIRCLES, PROMPTS):
        for options in OPTIONS.values():
            torch.manual_seed(3)
            expected = native.generate(**made(prompts, **options))
            torch.manual_seed(3)
            assert_same(expected, ours.generate(**made(prompts, **options)))
    (engine,) = ours.generate.engines
    assert (engine.stats.num_reserved, engine.scheduler.faults()) == (0, [])


def test_text_that_repeats_takes_fewer_iterations():
    native, guessing = make_twins(OrcaConfig(num_speculative_tokens=3))
    never = orca_hf.wrap(make_model(), OrcaConfig(num_speculative_tokens=0))
    call = made([CIRCLES[0]], max_new_tokens=60)
    counts = []
    for model in (never, guessing):
        before = num_iterations(model)
        assert_same(native.generate(**call), model.generate(**call))
        counts.append(num_iterations(model) - before)
    assert counts[0] == 60 > counts[1]
    request = Request(CIRCLES[0], 60, owner=Owner())
    iterations = run([request], make_scheduler(num_slots=80), Speculation(3), lambda tokens: tokens[-3])
    assert len(iterations) == 15


@pytest.mark.parametrize("num_tokens", [1, 4])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.1, "top_p": 0.9}, {"temperature": 0.1, "eos_token_id": [7]}])
def test_a_sampled_row_draws_what_it_would_and_no_number_more(options, num_tokens):
    native, ours = make_twins(OrcaConfig(num_speculative_tokens=num_tokens))
    for seed in range(8):
        call = made([CIRCLES[seed % 4]], max_new_tokens=30, **{**options, "do_sample": True})
        results = []
        for model in (native, ours):
            torch.manual_seed(seed)
            results.append((model.generate(**call), torch.get_rng_state()))
        assert_same(results[0][0], results[1][0])
        assert torch.equal(results[0][1], results[1][1])
    (engine,) = ours.generate.engines
    if "temperature" in options:
        assert engine.work.done.num_accepted_tokens > 0


def test_a_streamer_gets_the_tokens_one_by_one():
    class Recorder(BaseStreamer):
        def __init__(self):
            self.seen = []

        def put(self, value):
            self.seen.append(value.tolist())

        def end(self):
            self.seen.append("end")

    seen = []
    for model in make_twins(OrcaConfig(num_speculative_tokens=4)):
        recorder = Recorder()
        model.generate(**made([CIRCLES[0]], max_new_tokens=30, streamer=recorder))
        seen.append(recorder.seen)
    assert seen[0] == seen[1]


def test_submitted_requests_get_their_tokens_and_log_probabilities():
    native, ours = make_twins(OrcaConfig(num_speculative_tokens=4))
    engine = orca_hf.engine(ours)
    handles = [engine.submit(prompt, max_new_tokens=30, do_sample=False, logprobs=2) for prompt in CIRCLES]
    for prompt, handle in zip(CIRCLES, handles, strict=True):
        told = native.generate(
            torch.tensor([prompt]), max_new_tokens=30, do_sample=False, return_dict_in_generate=True, output_logits=True
        )
        tokens = told.sequences[0, len(prompt) :].tolist()
        assert list(handle) == tokens
        for logits, token, entry in zip(told.logits, tokens, handle.logprobs, strict=True):
            assert entry.logprob == pytest.approx(logits[0].log_softmax(-1)[token].item(), abs=1e-4)
    stats = engine.stats()
    assert 0 < stats.num_accepted_tokens <= stats.num_draft_tokens


def test_deterministic_to_the_last_bit():
    config = OrcaConfig(deterministic=True, num_speculative_tokens=3, max_batch_size=8)
    model = orca_hf.wrap(make_model(), config)
    one = made([CIRCLES[0]], max_new_tokens=20, return_dict_in_generate=True, output_logits=True)
    many = made(max_new_tokens=60)
    alone, together = [model.generate(**one), model.generate(**many)], joined_calls(model, [one, many], num_rows=5)[1:]
    assert all(torch.equal(a, b) for a, b in zip(alone[0].logits, together[0].logits, strict=True))
    assert torch.equal(alone[1], together[1])
    shared = [record.shares for record in model.generate.work.done.recent if len(record.shares) == 6]
    assert any(share.kind == "decode" and share.num_tokens > 1 for shares in shared for share in shares)


class Owner:
    may_guess = True


Model = Callable[[list[int]], int]  # from all tokens to the next


def run(requests: list[Request], scheduler: Scheduler, speculation: Speculation, model: Model) -> list[Iteration]:
    """Serve the requests, holding every iteration to what it must keep to."""
    for request in requests:
        scheduler.submit(request)
    iterations = []
    while not scheduler.idle:
        planned = scheduler.schedule()
        assert planned is not None
        iteration = speculation.extend(planned, pays=True, max_tokens=scheduler.max_batch_tokens)
        iterations.append(iteration)
        assert iteration.num_tokens <= (scheduler.max_batch_tokens or iteration.num_tokens)
        scheduler.complete(iteration)
        for step in iteration.steps:
            request = step.request
            assert step.start + step.length <= request.max_slots
            if step.samples:
                guesses = list(step.draft)
                known = [*request.prompt, *request.generated]
                assert len(known) + len(guesses) == step.start + step.length
                tokens = [model(known + guesses[:i]) for i in range(step.num_samples)]
                scheduler.append(request, speculation.judge(step, tokens) if guesses else tokens)
                if len(request.generated) == request.max_new_tokens:
                    scheduler.finish(request)
    assert scheduler.faults() == []
    return iterations


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=9), st.integers(1, 40)), min_size=1, max_size=5
    ),
    st.one_of(st.none(), st.integers(0, 6)),
    st.one_of(st.none(), st.integers(3, 12)),
    st.integers(1, 9),
)
def test_any_work_comes_out_as_without_guesses(work, num_tokens, max_batch_tokens, modulus):
    def model(tokens):
        """Any function of the tokens will do, if some of them repeat and others do not."""
        return (tokens[-1] * 3 + len(tokens) // 7) % modulus

    requests = [Request(prompt, length, owner=Owner()) for prompt, length in work]
    scheduler = make_scheduler(num_slots=60, max_batch_size=3, max_batch_tokens=max_batch_tokens)
    run(requests, scheduler, Speculation(num_tokens), model)
    for request, (prompt, length) in zip(requests, work, strict=True):
        tokens = list(prompt)
        for _ in range(length):
            tokens.append(model(tokens))
        assert request.generated == tokens[len(prompt) :]


def extended(speculation: Speculation, requests: list[Request], *, pays: bool = True) -> tuple[tuple[int, ...], ...]:
    steps = (Step(request, request.known - 1, 1, samples=True) for request in requests)
    return tuple(step.draft for step in speculation.extend(Iteration(tuple(steps)), pays=pays, max_tokens=512).steps)


def circling(request_id: int = 0) -> Request:
    request = Request(CIRCLES[0], 500, owner=Owner())
    request.request_id = request_id
    return request


def test_it_guesses_only_where_that_pays():
    assert extended(Speculation(None), [circling()], pays=False) == ((),)
    assert extended(Speculation(None), [circling()]) == ((5, 6, 7),)
    assert extended(Speculation(2), [circling()], pays=False) == ((5, 6),)
    assert extended(Speculation(0), [circling()]) == ((),)
    crowd = [circling(i) for i in range(16)]
    assert not any(extended(Speculation(None), crowd))
    assert sum(map(len, extended(Speculation(None), crowd[:10]))) == 6


def test_who_guesses_wrong_too_often_is_left_alone_for_a_while():
    speculation, request = Speculation(3), circling()
    given = []
    for _ in range(60):
        (draft,) = extended(speculation, [request])
        given.append(bool(draft))
        step = Step(request, request.known - 1, 1 + len(draft), samples=True, draft=draft)
        if draft:
            assert list(speculation.judge(step, [90] * step.num_samples)) == [90]
    assert given[:3] == [True] * 3
    assert 3 <= sum(given) <= 12
    assert True in given[30:]
