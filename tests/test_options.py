"""Promise: every field of GenerationConfig runs by Orca or goes native, and either way gives what native gives.

A field that a later transformers adds fails the first test until someone decides where it belongs.
"""

import inspect

import pytest
import torch
from tiny import PROMPTS, make_model, pad_left
from transformers import CompileConfig, GenerationConfig, GenerationMixin, WatermarkingConfig

import orca_hf
from orca_hf import OrcaConfig

SAMPLED = {"do_sample": True}
ENDS = {"eos_token_id": list(range(3, 50))}

# Field: (a value that means something, what has to be set beside it, how the call runs).
FIELDS = {
    "max_length": (19, {"max_new_tokens": None}, "orca"),
    "max_new_tokens": (5, {}, "orca"),
    "min_length": (17, ENDS, "orca"),
    "min_new_tokens": (6, ENDS, "orca"),
    "early_stopping": (True, {}, "orca"),
    "max_time": (100.0, {}, "orca"),
    "stop_strings": ("abc", {}, "native"),  # without a tokenizer; with one, see test_generate.test_stop_strings
    "do_sample": (True, {}, "orca"),
    "num_beams": (2, {}, "native"),
    "use_mtp": (True, {}, "native"),
    "use_cache": (False, {}, "orca"),
    "cache_implementation": ("static", {}, "native"),
    "cache_config": ({"backend": "quanto"}, {}, "orca"),
    "max_cache_len": (64, {}, "orca"),
    "temperature": (0.7, SAMPLED, "orca"),
    "top_k": (5, SAMPLED, "orca"),
    "top_p": (0.8, SAMPLED, "orca"),
    "min_p": (0.05, SAMPLED, "orca"),
    "top_h": (0.6, SAMPLED, "orca"),
    "typical_p": (0.9, SAMPLED, "orca"),
    "epsilon_cutoff": (0.001, SAMPLED, "orca"),
    "eta_cutoff": (0.001, SAMPLED, "orca"),
    "repetition_penalty": (1.7, {}, "orca"),
    "encoder_repetition_penalty": (1.7, {}, "orca"),
    "length_penalty": (0.5, {}, "orca"),
    "no_repeat_ngram_size": (2, {}, "orca"),
    "bad_words_ids": ([[33], [20, 21]], {}, "orca"),
    "renormalize_logits": (True, SAMPLED, "orca"),
    "forced_bos_token_id": (7, {}, "orca"),
    "forced_eos_token_id": (9, {}, "orca"),
    "remove_invalid_values": (True, {}, "orca"),
    "exponential_decay_length_penalty": ((2, 1.5), ENDS, "orca"),
    "suppress_tokens": (list(range(5, 50)), {}, "orca"),
    "begin_suppress_tokens": (list(range(5, 50)), {}, "orca"),
    "sequence_bias": ([[[33], 5.0]], {}, "orca"),
    "token_healing": (True, {}, "native"),
    "guidance_scale": (1.5, {}, "native"),
    "watermarking_config": (WatermarkingConfig(bias=4.0), {}, "orca"),
    "num_return_sequences": (2, SAMPLED, "orca"),
    "output_attentions": (True, {"return_dict_in_generate": True}, "native"),
    "output_hidden_states": (True, {"return_dict_in_generate": True}, "native"),
    "output_scores": (True, {"return_dict_in_generate": True}, "orca"),
    "output_logits": (True, {"return_dict_in_generate": True}, "orca"),
    "return_dict_in_generate": (True, {}, "orca"),
    "pad_token_id": (4, ENDS, "orca"),
    "bos_token_id": (3, {}, "orca"),
    "eos_token_id": (list(range(3, 60)), {}, "orca"),
    "encoder_no_repeat_ngram_size": (2, {}, "orca"),
    "decoder_start_token_id": (5, {}, "orca"),
    "is_assistant": (True, {}, "native"),
    "num_assistant_tokens": (3, {}, "orca"),
    "num_assistant_tokens_schedule": ("heuristic", {}, "orca"),
    "assistant_confidence_threshold": (0.5, {}, "orca"),
    "prompt_lookup_num_tokens": (2, {}, "native"),
    "max_matching_ngram_size": (2, {}, "orca"),
    "assistant_early_exit": (1, {}, "native"),
    "assistant_lookbehind": (5, {}, "orca"),
    "target_lookbehind": (5, {}, "orca"),
    "assistant_ensemble_weight": (0.5, {}, "orca"),
    "speculation_type": (None, {}, "orca"),
    "compile_config": (CompileConfig(), {}, "orca"),
    "disable_compile": (True, {}, "orca"),
    "continuous_batching_config": (None, {}, "orca"),
    "low_memory": (True, {}, "orca"),
    "penalty_alpha": (0.5, {"top_k": 4}, "native"),
    "dola_layers": ("low", {}, "native"),
    "diversity_penalty": (0.5, {}, "orca"),
    "num_beam_groups": (2, {"num_beams": 2, "diversity_penalty": 0.5}, "native"),
    "constraints": ([], {}, "native"),
    "force_words_ids": ([[5]], {"num_beams": 2}, "native"),
    "prefill_chunk_size": (4, {}, "orca"),
}  # fmt: skip
NOT_OPTIONS = {"_from_model_config", "transformers_version"}

# Argument of generate(): how a call that uses it runs; each is tried in test_generate.py.
ARGUMENTS = {
    "inputs": "orca",
    "generation_config": "orca",
    "logits_processor": "orca",
    "stopping_criteria": "orca",
    "prefix_allowed_tokens_fn": "orca",
    "synced_gpus": "native",
    "assistant_model": "native",
    "streamer": "orca",
    "negative_prompt_ids": "native",
    "negative_prompt_attention_mask": "orca",  # says nothing without the ids
    "custom_generate": "native",
    "kwargs": "orca",
}


@pytest.fixture(scope="module")
def twins():
    config = OrcaConfig(max_batch_size=3, max_batch_tokens=7, max_slots=256, block_size=4)
    return make_model(), orca_hf.wrap(make_model(), config)


def test_every_field_and_argument_has_been_decided():
    assert set(vars(GenerationConfig())) - NOT_OPTIONS == set(FIELDS)
    assert set(inspect.signature(GenerationMixin.generate).parameters) - {"self"} == set(ARGUMENTS)


def outcome(model, rows, options):
    torch.manual_seed(0)
    try:
        return model.generate(**pad_left(PROMPTS[:rows]), **{"max_new_tokens": 8, "do_sample": False, **options})
    except Exception as error:
        return error


@pytest.mark.parametrize("rows", [1, len(PROMPTS)])
@pytest.mark.parametrize("name", FIELDS)
def test_a_field_gives_what_it_gives_natively(twins, name, rows):
    value, beside, runs_by = FIELDS[name]
    options = {**beside, name: value}
    native, ours = (outcome(model, rows, options) for model in twins)
    if isinstance(native, Exception):
        assert type(ours) is type(native), (native, ours)
        assert str(ours) == str(native)
    else:
        assert type(ours) is type(native)
        tokens = [result if isinstance(result, torch.Tensor) else result.sequences for result in (native, ours)]
        assert torch.equal(*tokens)
    made = {"max_new_tokens": 8, "do_sample": False, **options}
    try:
        explanation = orca_hf.explain(twins[1], **pad_left(PROMPTS[:rows]), **made)
    except Exception as error:
        assert type(error) is type(native)
    else:
        assert explanation.runs_by == runs_by, explanation


def test_the_same_fields_count_in_a_configuration(twins):
    """kwargs are merged into a configuration natively; given as one, a field must not slip through."""
    for name, (value, beside, runs_by) in FIELDS.items():
        try:
            config = GenerationConfig(**{"max_new_tokens": 8, **beside, name: value})
            explanation = orca_hf.explain(twins[1], config, **pad_left(PROMPTS))
        except Exception as error:
            assert isinstance(outcome(twins[0], 1, {**beside, name: value}), type(error)), name
        else:
            assert explanation.runs_by == runs_by, (name, explanation)
