"""Promise: options together, as users combine them, give what they give natively: tokens, scores, logits, draws."""

import os
import random

import pytest
import torch
from drawn_options import MANY, drawn_call
from oracle import assert_same_outcome, make_twins, num_iterations, outcome
from tiny import PROMPTS, VOCAB, pad_left
from transformers import SynthIDTextWatermarkingConfig, WatermarkingConfig

import orca_hf

# More of them for a long run, from another seed: NUM_COMBINATIONS=2000 FIRST_COMBINATION=1000.
NUM_COMBINATIONS = int(os.environ.get("NUM_COMBINATIONS", "60"))
FIRST_COMBINATION = int(os.environ.get("FIRST_COMBINATION", "0"))
RECORDED = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}


@pytest.fixture(scope="module")
def twins():
    return make_twins()


OPTIONS = {
    "greedy": {},
    "max_length": {"max_new_tokens": None, "max_length": 20},
    "default length": {"max_new_tokens": None},
    "eos": {"eos_token_id": 33},
    "eos list": {"eos_token_id": [33, 61, 80, 5, 17, 40, 41, 42]},
    "eos often": {"eos_token_id": MANY},
    "eos and min_new_tokens": {"eos_token_id": MANY, "min_new_tokens": 5},
    "eos and min_length": {"eos_token_id": MANY, "min_length": 16},
    "min_length within the padding": {"eos_token_id": MANY, "min_length": 9},
    "pad is another": {"eos_token_id": MANY, "pad_token_id": 7},
    "pad is one of eos": {"eos_token_id": MANY, "pad_token_id": 5},
    "pad from eos": {"eos_token_id": 33, "pad_token_id": None},
    "repetition_penalty counts the prompt": {"repetition_penalty": 40.0},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.8, "repetition_penalty": 0.7},
    "no_repeat_ngram over the prompt's end": {"no_repeat_ngram_size": 1},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 2, "no_repeat_ngram_size": 3},
    "bad words over several tokens": {"bad_words_ids": [[33], [61, 4], [20, 21, 22], [15, 91], [91, 16, 34, 34]]},
    "bad words that begin in the prompt": {"bad_words_ids": [[15, 91], [22, 87], [30, 72], [46, 6], [52, 53, 45]]},
    "a bad word of eos": {"bad_words_ids": [[33], [33, 5]], "eos_token_id": 33},
    "sequence_bias over several tokens": {"sequence_bias": [[[33], -5.0], [[20, 21], 4.0], [[15, 91, 16], -9.0]]},
    "sequence_bias by tuples": {"sequence_bias": {(33,): -5.0, (14, 15, 91): -9.0, (30, 8): 50.0, (30, 8, 9): 50.0}},
    "suppress_tokens": {"suppress_tokens": list(range(10, 40)), "begin_suppress_tokens": [50, 51]},
    "everything suppressed": {"suppress_tokens": list(range(VOCAB))},
    "everything suppressed, sampled": {"suppress_tokens": list(range(VOCAB)), "do_sample": True},
    "invalid values removed": {
        "suppress_tokens": list(range(VOCAB)), "do_sample": True, "remove_invalid_values": True},
    "forced_eos": {"forced_eos_token_id": 9, "eos_token_id": 9},
    "forced_eos list": {"forced_eos_token_id": [9, 10], "eos_token_id": [9, 10]},
    "exponential decay": {"exponential_decay_length_penalty": (3, 1.4), "eos_token_id": 33},
    "exponential decay at once": {"exponential_decay_length_penalty": (0, 3.0), "eos_token_id": [33, 34]},
    "renormalize": {"renormalize_logits": True, "repetition_penalty": 1.2},
    "several sequences": {"do_sample": True, "num_return_sequences": 3, "eos_token_id": MANY},
    "sample": {"do_sample": True},
    "sample, all warpers": {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01,
                            "typical_p": 0.95, "epsilon_cutoff": 3e-4, "eta_cutoff": 3e-4, "top_h": 0.9},
    "sample hot": {"do_sample": True, "temperature": 3.0, "top_k": 0},
    "scores": {"return_dict_in_generate": True, "output_scores": True},
    "scores, logits, eos": {**RECORDED, "eos_token_id": MANY, "repetition_penalty": 1.3},
    "sampled scores": {**RECORDED, "do_sample": True, "eos_token_id": 33},
    "scores without dict": {"output_scores": True, "output_logits": True},
    "dict alone": {"return_dict_in_generate": True, "eos_token_id": MANY},
    "no cache": {"use_cache": False},
    "no cache, dict": {"use_cache": False, "return_dict_in_generate": True},
    "chunks": {"prefill_chunk_size": 3, **RECORDED},
    "max_time": {"max_time": 100.0},
    "no time": {"max_time": 0.0, **RECORDED},
    "watermark": {"watermarking_config": WatermarkingConfig(bias=3.0, seeding_scheme="selfhash"), "do_sample": True},
    "watermark, several": {"watermarking_config": WatermarkingConfig(context_width=2), "num_return_sequences": 2,
                           "do_sample": True, "eos_token_id": MANY},
    "SynthID": {"watermarking_config": SynthIDTextWatermarkingConfig(3, [3, 5, 7, 11]), "do_sample": True,
                "num_return_sequences": 2, "eos_token_id": MANY, **RECORDED},
}  # fmt: skip


@pytest.mark.parametrize("rows", [1, len(PROMPTS)])
@pytest.mark.parametrize("name", OPTIONS)
def test_options_by_orca_equal_native(twins, name, rows):
    call = {"max_new_tokens": 10, "do_sample": False, **pad_left(PROMPTS[:rows]), **OPTIONS[name]}
    before = num_iterations(twins[1])
    assert_same_outcome(twins, lambda model: model.generate(**call))
    assert num_iterations(twins[1]) > before
    assert orca_hf.explain(twins[1], **call).runs_by == "orca"


def test_a_row_ends_at_its_first_eos_and_is_padded_to_the_longest_row(twins):
    """What the promise is about, said without native."""
    ends = [33, 61, 80, 5, 17, 40, 41, 42, 45]
    call = {**pad_left(PROMPTS), "max_new_tokens": 30, "do_sample": False, "pad_token_id": 96}
    free = twins[1].generate(**call)
    width = call["input_ids"].shape[1]
    for eos in (ends, torch.tensor(ends)):
        ended = twins[1].generate(**call, eos_token_id=eos)
        lengths = []
        for row, whole in zip(ended[:, width:].tolist(), free[:, width:].tolist(), strict=True):
            length = next((i + 1 for i, token in enumerate(whole) if token in ends), len(whole))
            assert row == whole[:length] + [96] * (len(row) - length)
            lengths.append(length)
        assert ended.shape[1] == width + max(lengths)
        assert len(set(lengths)) > 2


OWN_CODE = {"prefix_allowed_tokens_fn", "logits_processor", "stopping_criteria"}


@pytest.mark.parametrize("number", range(FIRST_COMBINATION, FIRST_COMBINATION + NUM_COMBINATIONS))
def test_a_random_combination_equals_native(twins, number):
    call = drawn_call(random.Random(number))
    before = num_iterations(twins[1])
    native = assert_same_outcome(twins, lambda model: model.generate(**call), seed=number).result
    explained = outcome(lambda: orca_hf.explain(twins[1], **call)).result
    if isinstance(native, Exception):
        assert isinstance(explained, type(native)) or explained.runs_by == "orca"
    elif call.get("use_cache") is False and OWN_CODE & call.keys():
        assert "without a cache" in str(explained)
    else:
        assert explained.runs_by == "orca", explained
        assert num_iterations(twins[1]) > before


NATIVE_OPTIONS = {
    "beams": ({"num_beams": 2, "num_return_sequences": 2, **RECORDED}, "beam_search"),
    "beams, sampled": ({"num_beams": 2, "do_sample": True}, "beam_sample"),
    "prompt lookup": ({"prompt_lookup_num_tokens": 2, "max_matching_ngram_size": 1}, "assisted_generation"),
    "static cache": ({"cache_implementation": "static"}, "cache_implementation"),
    "attentions": ({**RECORDED, "output_attentions": True}, "output_attentions"),
    "hidden states": ({**RECORDED, "output_hidden_states": True}, "output_hidden_states"),
    "guidance": ({"guidance_scale": 1.5}, "guidance_scale"),
    "guidance, negative": (
        {"guidance_scale": 1.5, "negative_prompt_ids": torch.tensor([[9, 8, 7]])}, "guidance_scale"),
    "beyond the positions": ({"max_new_tokens": 120}, "128 positions"),
}  # fmt: skip


@pytest.mark.parametrize("name", NATIVE_OPTIONS)
def test_options_that_go_native_equal_native_and_say_why(twins, name):
    options, reason = NATIVE_OPTIONS[name]
    rows = 1 if name in ("prompt lookup", "guidance, negative") else len(PROMPTS)
    call = {"max_new_tokens": 10, "do_sample": False, **pad_left(PROMPTS[:rows]), **options}
    before = num_iterations(twins[1])
    native = assert_same_outcome(twins, lambda model: model.generate(**call)).result
    assert not isinstance(native, Exception)
    explanation = orca_hf.explain(twins[1], **call)
    assert explanation.runs_by == "native"
    assert reason in str(explanation)
    assert num_iterations(twins[1]) == before


def test_an_assistant_goes_native_and_equals_native(twins):
    assistant, wrapped = make_twins()
    call = {"input_ids": torch.tensor([PROMPTS[0]]), "max_new_tokens": 12, "do_sample": False}
    for helper in (assistant, wrapped):
        assert_same_outcome(twins, lambda model, helper=helper: model.generate(**call, assistant_model=helper))
        assert "assisted_generation" in str(orca_hf.explain(twins[1], **call, assistant_model=helper))
