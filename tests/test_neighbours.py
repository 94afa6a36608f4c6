"""Promise: a request's tokens are its own, whoever shares its iterations; and nothing of the caller's is touched."""

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from joined import joined_calls
from oracle import SMALL, assert_same, assert_same_outcome, make_twins
from tiny import PROMPTS, VOCAB, make_model, pad_left
from transformers import GenerationConfig, LogitsProcessor, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

import orca_hf
from orca_hf import OrcaConfig

MODEL = make_model()  # native; its weights never change
SCORES = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
OPTIONS = [
    {},
    {"eos_token_id": list(range(3, 40))},
    {"repetition_penalty": 1.7, "eos_token_id": 33},
    {"no_repeat_ngram_size": 2},
    {"min_new_tokens": 4, "eos_token_id": list(range(3, 60))},
    {"bad_words_ids": [[33], [61, 4]], "sequence_bias": [[[20, 21], 4.0]]},
    {"encoder_repetition_penalty": 1.5},
    SCORES,
    {**SCORES, "eos_token_id": list(range(3, 60))},
    {"logits_processor": [lambda input_ids, scores: scores.roll(1, dims=-1)]},
    {"stopping_criteria": [lambda input_ids, scores: input_ids[:, -1] % 5 == 0]},
]


@st.composite
def calls(draw: Callable[..., Any]) -> dict[str, Any]:
    tokens = st.lists(st.integers(3, VOCAB - 1), min_size=1, max_size=12)
    prompts = draw(st.lists(tokens, min_size=1, max_size=3))
    return {
        **pad_left(prompts),
        "max_new_tokens": draw(st.integers(1, 12)),
        "do_sample": False,
        **draw(st.sampled_from(OPTIONS)),
    }


@st.composite
def configs(draw: Callable[..., Any]) -> OrcaConfig:
    size = draw(st.integers(1, 8))
    return OrcaConfig(
        max_batch_size=size,
        max_batch_tokens=draw(st.one_of(st.none(), st.integers(size, 24))),
        max_slots=1024,
        block_size=draw(st.sampled_from([1, 4, 16])),
        pack_weights=draw(st.booleans()),
    )


@settings(max_examples=25, deadline=None, derandomize=True)
@given(config=configs(), together=st.lists(calls(), min_size=1, max_size=5))
def test_calls_that_share_iterations_give_what_each_gives_alone(config, together):
    alone = [MODEL.generate(**call) for call in together]
    model = orca_hf.wrap(make_model(), config)
    model.generate(torch.tensor([[5]]), max_new_tokens=1)
    num_rows = sum(len(call["input_ids"]) for call in together)
    for native, ours in zip(alone, joined_calls(model, together, num_rows)[1:], strict=True):
        assert_same(native, ours)


@pytest.mark.parametrize("size", [1, 2, 5, 32])
@pytest.mark.parametrize("tokens", [None, 1, 3, 64])
def test_one_call_is_the_same_under_any_settings(size, tokens):
    """Chunks of a prompt, rows that wait and rows that leave change nothing."""
    config = OrcaConfig(max_batch_size=size, max_batch_tokens=tokens and max(size, tokens), max_slots=512)
    call = {**pad_left(PROMPTS), "max_new_tokens": 9, "eos_token_id": list(range(3, 30)), "do_sample": False}
    model = orca_hf.wrap(make_model(), config)
    assert_same(MODEL.generate(**call), model.generate(**call))


MODES = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}
KINDS = {
    "plain": {},
    "processed": {"repetition_penalty": 1.5, "eos_token_id": list(range(3, 40))},
    "sampled": {"do_sample": True},
    "with everything": {**SCORES, "do_sample": True},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", itertools.permutations(MODES), ids="-".join)
def test_calls_in_different_modes_follow_each_other(order, kind):
    twins = make_twins()
    for mode in order:

        def call(model, mode=mode):
            with MODES[mode]():
                return model.generate(**pad_left(PROMPTS[:3]), max_new_tokens=5, **KINDS[kind])

        assert_same_outcome(twins, call)
        assert torch.is_grad_enabled()


class ModeRecorder(BaseStreamer):
    def __init__(self):
        self.heard = []

    def put(self, value):
        self.heard.append((value.is_inference(), torch.is_inference_mode_enabled(), torch.is_grad_enabled()))

    def end(self):
        self.heard.append("end")


class InModel:
    """generate() under a mode, for `joined_calls`."""

    def __init__(self, model, modes):
        self.generate = self
        self.engines = model.generate.engines
        self.model = model
        self.modes = dict(modes)

    def __call__(self, **kwargs):
        with self.modes.get(kwargs.get("max_new_tokens"), torch.enable_grad)():
            return self.model.generate(**kwargs)


@pytest.mark.parametrize("mine", MODES)
@pytest.mark.parametrize("drivers", MODES)
def test_a_call_gets_results_of_its_own_mode_whoever_drives(mine, drivers):
    options = {**pad_left(PROMPTS[:1]), "max_new_tokens": 7, "do_sample": False}
    kinds = [{}, {"repetition_penalty": 1.5}, SCORES]
    model = orca_hf.wrap(make_model(), SMALL)
    model.generate(**options)
    heard = {"native": [], "ours": []}
    for extra in kinds:
        streamer = ModeRecorder()
        with MODES[mine]():
            native = MODEL.generate(**options, **extra, streamer=streamer)
        heard["native"].append(streamer.heard)
        streamer = ModeRecorder()
        # The first call, of 24 tokens, drives; that of 7 is over before.
        _, ours = joined_calls(
            InModel(model, {24: MODES[drivers], 7: MODES[mine]}), [{**options, **extra, "streamer": streamer}]
        )
        heard["ours"].append(streamer.heard)
        assert_same(native, ours)
    assert heard["ours"] == heard["native"]


class Raises(LogitsProcessor):
    def __call__(self, input_ids, scores):
        raise ZeroDivisionError


class StopNow(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return torch.ones(len(input_ids), dtype=torch.bool)


class ClosedPipe(BaseStreamer):
    def put(self, value):
        raise OSError("closed pipe")

    def end(self):
        pass


CALLS = {
    "greedy": {},
    "sampled": {"do_sample": True, "top_p": 0.9},
    "several sequences": {"do_sample": True, "num_return_sequences": 2},
    "eos": {"eos_token_id": list(range(3, 40))},
    "scores": SCORES,
    "lists": {"bad_words_ids": [[33], [61, 4]], "sequence_bias": [[[20, 21], 4.0]], "suppress_tokens": [4, 5]},
    "user's objects": {"logits_processor": [lambda i, s: s], "stopping_criteria": [StopNow()]},
    "native": {"num_beams": 2},
    "a processor raises": {"logits_processor": [Raises()]},
    "a streamer raises": {"streamer": ClosedPipe()},
    "a token outside the vocabulary": {"input_ids": torch.full((5, 11), VOCAB + 5)},
    "an impossible setting": {"do_sample": True, "temperature": -1.0},
    "an unknown argument": {"no_such_argument": 1},
}


def state_of(model):
    """Everything about a model that a user could find changed."""
    return (
        model.generation_config.to_dict(),
        model.config.to_dict(),
        [module.training for module in model.modules()],
        model.config._attn_implementation,
        [(name, id(parameter), parameter._version) for name, parameter in model.named_parameters()],
        [sorted(module.__dict__) for module in model.modules()],
    )


@pytest.mark.parametrize("how", ["kwargs", "config", "config and kwargs", "model's config"])
@pytest.mark.parametrize("name", CALLS)
def test_nothing_of_the_callers_is_changed(name, how):
    """Also not by a call that raises, and not by asking how it would run."""
    model = orca_hf.wrap(make_model(), SMALL)
    batch = pad_left(PROMPTS)
    options = {"max_new_tokens": 4, **CALLS[name]}
    call = {**batch, **options}
    if how != "kwargs":
        settings = {key: value for key, value in options.items() if hasattr(GenerationConfig(), key)}
        try:
            config = GenerationConfig(**{"eos_token_id": 33, **settings})
        except ValueError:
            return  # natively no such configuration can be made
        call = {key: value for key, value in call.items() if key not in settings}
        if how == "model's config":
            model.generation_config = config
        else:
            call["generation_config"] = config
        if how == "config and kwargs":
            call["max_new_tokens"] = 3
    kept = {key: value.to_dict() if isinstance(value, GenerationConfig) else repr(value) for key, value in call.items()}
    versions = {key: value._version for key, value in call.items() if isinstance(value, torch.Tensor)}
    before = state_of(model)
    generators = torch.get_rng_state(), numpy.random.get_state()[1].tolist(), random.getstate()
    for ask in (lambda: orca_hf.explain(model, **call), lambda: model.generate(**call)):
        try:
            ask()
        except (ValueError, OSError, ZeroDivisionError, IndexError):
            assert "raises" in name or "outside" in name or "impossible" in name or "unknown" in name
        assert state_of(model) == before
        for key, value in call.items():
            assert kept[key] == (value.to_dict() if isinstance(value, GenerationConfig) else repr(value)), key
        assert {key: value._version for key, value in call.items() if isinstance(value, torch.Tensor)} == versions
        if not options.get("do_sample") or ask.__code__.co_names[0] == "orca_hf":
            assert torch.equal(torch.get_rng_state(), generators[0])
        assert numpy.random.get_state()[1].tolist() == generators[1]
        assert random.getstate() == generators[2]
