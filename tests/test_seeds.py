"""Promise: the same seed gives native's tokens, whatever the settings and whoever else generates; greedy needs none."""

import random
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import numpy
import pytest
import torch
from joined import gated_call
from oracle import SMALL, assert_same, assert_same_outcome, make_twins, outcome
from tiny import PROMPTS, make_model, pad_left
from transformers import set_seed

import orca_hf
from orca_hf import OrcaConfig

MODEL = make_model()
SAMPLED = {"do_sample": True, "max_new_tokens": 10}
WARPED = {**SAMPLED, "temperature": 1.4, "top_k": 30, "top_p": 0.95, "eos_token_id": list(range(3, 25))}
# Rows wait for each other, are cut into chunks, or all run at once.
CONFIGS = [
    OrcaConfig(max_batch_size=size, max_batch_tokens=tokens, max_slots=512, block_size=block)
    for size, tokens, block in ((1, 1, 1), (2, 7, 4), (3, None, 16), (32, 512, 16))
]


@pytest.fixture(scope="module")
def twins():
    return make_twins()


def generators():
    return torch.get_rng_state().tolist(), numpy.random.get_state()[1].tolist(), random.getstate()


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.5}, {"num_beams": 2}], ids=str)
def test_greedy_leaves_every_generator_alone(options):
    """The first call too, in which the model is tried and its weights are packed, and the question how it would run."""
    set_seed(3)
    before = generators()
    model = orca_hf.wrap(make_model(), SMALL)
    set_seed(3)
    call = {**pad_left(PROMPTS), "max_new_tokens": 30, "do_sample": False, **options}
    orca_hf.explain(model, **call)
    for _ in range(2):
        model.generate(**call)
    orca_hf.unwrap(model)
    assert generators() == before


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("prompt", PROMPTS[:2], ids=len)
def test_one_row_draws_natives_tokens(twins, prompt, seed):
    for options in (SAMPLED, WARPED):
        assert_same_outcome(twins, lambda m, o=options: m.generate(torch.tensor([prompt]), **o), seed=seed)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.max_batch_size}-{c.max_batch_tokens}")
@pytest.mark.parametrize("options", [SAMPLED, WARPED, {**WARPED, "num_return_sequences": 3}], ids=len)
def test_many_rows_draw_natives_tokens_under_any_settings(config, options):
    twins = MODEL, orca_hf.wrap(make_model(), config)
    for seed in range(2):
        assert_same_outcome(twins, lambda model: model.generate(**pad_left(PROMPTS), **options), seed=seed)


def test_the_three_seeds_of_set_seed_give_the_same_call_twice(twins):
    results = []
    for model in (twins[0], twins[1], twins[1]):
        set_seed(11)
        results.append(model.generate(**pad_left(PROMPTS), **WARPED))
        results.append(model.generate(**pad_left(PROMPTS), **WARPED))
    assert torch.equal(results[0], results[2])
    assert torch.equal(results[1], results[3])
    assert torch.equal(results[2], results[4])
    assert not torch.equal(results[0], results[1])


def test_expanded_rows_stay_in_order(twins):
    """Two sequences of each prompt come as p0, p0, p1, p1, and differ."""
    call = {**pad_left(PROMPTS[:2]), **SAMPLED, "num_return_sequences": 2}
    result = assert_same_outcome(twins, lambda model: model.generate(**call)).result
    width = call["input_ids"].shape[1]
    assert torch.equal(result[:, :width], call["input_ids"].repeat_interleave(2, dim=0))
    assert len({tuple(row) for row in result.tolist()}) == 4


@pytest.mark.parametrize("rows", [1, len(PROMPTS)])
@pytest.mark.parametrize("seed", range(3))
def test_a_seeded_call_draws_natives_tokens_while_others_generate(seed, rows):
    """Others, sampled and greedy, hold their own numbers: they began before, and end after it."""
    call = {**pad_left(PROMPTS[:rows]), **WARPED}
    expected = outcome(lambda: MODEL.generate(**call), seed)
    model = orca_hf.wrap(make_model(), OrcaConfig(max_batch_size=4, max_batch_tokens=16, max_slots=1024))
    model.generate(torch.tensor([[5]]), max_new_tokens=1)
    others = [
        {"input_ids": torch.tensor([PROMPTS[3]]), "max_new_tokens": 60, "do_sample": True},
        {**pad_left(PROMPTS[:3]), "max_new_tokens": 40, "do_sample": True, "temperature": 2.0},
        {**pad_left(PROMPTS[1:4]), "max_new_tokens": 40, "do_sample": False, "repetition_penalty": 1.3},
    ]
    scheduler = model.generate.engines[0].scheduler
    driving = Event()
    torch.manual_seed(1000)
    first = gated_call(model, 7 + rows, driving)
    with ThreadPoolExecutor(4) as threads:
        futures = [threads.submit(model.generate, **first)]
        assert driving.wait(60)
        before = scheduler._next_id
        futures += [threads.submit(model.generate, **other) for other in others]
        while scheduler._next_id < before + 7:
            assert not any(future.done() for future in futures)
        found = outcome(lambda: model.generate(**call), seed)
        for future in futures:
            future.result(timeout=60)
    assert_same(expected.result, found.result)
    assert found.next_random == expected.next_random


TIGHT = [
    OrcaConfig(max_batch_size=size, max_slots=64, max_batch_tokens=tokens, block_size=8)
    for size, tokens in ((1, 1), (2, 8), (8, None))
]


def test_rows_that_do_not_fit_at_once_depend_on_the_seed_alone():
    """They draw from streams of their own: same seed, same tokens, under any settings."""
    made = {**pad_left(PROMPTS), "max_new_tokens": 12, "do_sample": True}
    results = {}
    for config in TIGHT:
        model = orca_hf.wrap(make_model(), config)
        for seed in (0, 1):
            torch.manual_seed(seed)
            result = model.generate(**made)
            assert torch.equal(results.setdefault(seed, result), result)
    assert not torch.equal(results[0], results[1])
    assert len({tuple(row.tolist()) for row in results[0][:, -12:]}) == len(PROMPTS)


class FullPipe:
    def __init__(self, calls):
        self.left = calls

    def put(self, value):
        self.left -= 1
        if not self.left:
            raise OSError("closed pipe")

    def end(self):
        pass


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("calls", [1, 2, 5])
@pytest.mark.parametrize("kind", ["streamer", "criterion", "no probabilities"])
def test_a_call_that_raises_leaves_the_generator_where_native_does(twins, kind, calls, rows):
    def criterion(input_ids, scores):
        return 1 / (11 + calls - input_ids.shape[1]) > 3

    def no_probabilities(input_ids, scores):
        return scores * float("nan") if input_ids.shape[1] == 10 + calls else scores

    def call(model):
        options = {
            "streamer": {"streamer": FullPipe(calls)},
            "criterion": {"stopping_criteria": [criterion]},
            "no probabilities": {"logits_processor": [no_probabilities]},
        }[kind]
        return model.generate(**pad_left(PROMPTS[:rows]), **SAMPLED, **options)

    assert isinstance(assert_same_outcome(twins, call).result, (OSError, ZeroDivisionError, RuntimeError))
