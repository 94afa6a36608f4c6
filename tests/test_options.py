"""Promise: every field of GenerationConfig runs by Orca or goes native, and either way gives what native gives.

So does every argument of generate(), and every kind of object that is passed in one. A field or argument that a later
transformers adds fails the first test until someone decides where it belongs. Each test records the row of a table:
the option, what runs it, the reason if that is the native path, and that the result was equal or the error the same.
"""

import asyncio
import inspect

import pytest
import torch
from oracle import assert_same, make_twins, num_iterations, outcome
from test_stop_strings import TOKENIZERS
from tiny import PROMPTS, VOCAB, make_model, pad_left
from transformers import (
    AsyncTextIteratorStreamer,
    CompileConfig,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
    TextIteratorStreamer,
    TextStreamer,
    WatermarkingConfig,
)
from transformers.generation import (
    ContinuousBatchingConfig,
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    TopKLogitsWarper,
)
from transformers.generation.streamers import BaseStreamer

import orca_hf

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
    "stop_strings": (["cc", "w"], {"tokenizer": TOKENIZERS["letters"]}, "orca"),
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
    "speculation_type": ("dflash", {}, "orca"),
    "compile_config": (CompileConfig(), {}, "orca"),
    "disable_compile": (True, {}, "orca"),
    "continuous_batching_config": (ContinuousBatchingConfig(), {}, "orca"),
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


class Heard(BaseStreamer):
    def put(self, value):
        pass

    def end(self):
        pass


def in_asyncio(generate, **call):
    async def run():
        streamer = AsyncTextIteratorStreamer(TOKENIZERS["letters"])
        return await asyncio.to_thread(generate, **call, streamer=streamer), [text async for text in streamer]

    return asyncio.run(run())


def negative(rows):
    return {"negative_prompt_ids": torch.full((rows, 3), 9), "guidance_scale": 1.5}


def replaced(model, input_ids, **prepared):
    return input_ids + 1


# Argument of generate(): (the call's arguments by its number of rows, how the call runs).
ARGUMENTS = {
    "inputs": (lambda rows: {"inputs": pad_left(PROMPTS[:rows])["input_ids"], "input_ids": None}, "orca"),
    "generation_config": (lambda rows: {"generation_config": GenerationConfig(max_new_tokens=3)}, "orca"),
    "logits_processor": (lambda rows: {"logits_processor": LogitsProcessorList([lambda ids, s: s.flip(-1)])}, "orca"),
    "stopping_criteria": (lambda rows: {"stopping_criteria": [lambda ids, s: ids[:, -1] % 3 == 0]}, "orca"),
    "prefix_allowed_tokens_fn": (lambda rows: {"prefix_allowed_tokens_fn": lambda row, ids: [row, len(ids)]}, "orca"),
    "synced_gpus": (lambda rows: {"synced_gpus": True}, "native"),  # which fails: there is no other process
    "assistant_model": (lambda rows: {"assistant_model": make_model(seed=5)}, "native"),
    "streamer": (lambda rows: {"streamer": Heard()}, "orca"),
    "negative_prompt_ids": (negative, "native"),
    "negative_prompt_attention_mask": (
        lambda rows: {"negative_prompt_attention_mask": torch.ones(rows, 3), **negative(rows)}, "native"),
    "custom_generate": (lambda rows: {"custom_generate": replaced}, "native"),
    "kwargs": (lambda rows: {"use_cache": True, "max_new_tokens": 4}, "orca"),
}  # fmt: skip

# What is passed in these arguments and fields; "refused" is a call that generate() itself does not take.
OBJECTS = {
    "streamer: TextStreamer": (lambda rows: {"streamer": TextStreamer(TOKENIZERS["letters"])}, "orca"),
    "streamer: TextIteratorStreamer": (lambda rows: {"streamer": TextIteratorStreamer(TOKENIZERS["letters"])}, "orca"),
    "streamer: AsyncTextIteratorStreamer": (lambda rows: {"in": in_asyncio}, "orca"),
    "watermarking_config: SynthID": (
        lambda rows: {"do_sample": True, "watermarking_config": SynthIDTextWatermarkingConfig(3, [3, 5, 7, 11])},
        "orca"),
    "watermarking_config: a dict": (
        lambda rows: {"do_sample": True, "watermarking_config": {"greenlist_ratio": 0.5, "bias": 3.0}}, "orca"),
    "logits_processor: one that generate() knows": (lambda rows: {"logits_processor": [TopKLogitsWarper(1)]}, "orca"),
    "stopping_criteria: EosTokenCriteria": (
        lambda rows: {"stopping_criteria": StoppingCriteriaList([EosTokenCriteria(ENDS["eos_token_id"])])}, "orca"),
    "stopping_criteria: MaxLengthCriteria": (lambda rows: {"stopping_criteria": [MaxLengthCriteria(14)]}, "orca"),
    "stopping_criteria: MaxTimeCriteria": (lambda rows: {"stopping_criteria": [MaxTimeCriteria(0.0)]}, "orca"),
    "stopping_criteria: none that ends": (
        lambda rows: {"stopping_criteria": [lambda ids, scores: ids.shape[1] > 14], "max_new_tokens": None}, "orca"),
    "eos_token_id: a number": (lambda rows: {"eos_token_id": 33}, "orca"),
    "eos_token_id: a tensor": (lambda rows: {"eos_token_id": torch.tensor(list(range(3, 60)))}, "orca"),
    "eos_token_id: no token": (lambda rows: {"eos_token_id": VOCAB + 9}, "orca"),
    "eos_token_id: negative": (lambda rows: {"eos_token_id": -1}, "orca"),
    "pad_token_id: that of eos": (lambda rows: {"eos_token_id": [33, 91, 16], "pad_token_id": 33}, "orca"),
    "pad_token_id: None": (lambda rows: {"eos_token_id": [33, 91, 16], "pad_token_id": None}, "orca"),
    "pad_token_id: a tensor": (lambda rows: {**ENDS, "pad_token_id": torch.tensor(7)}, "orca"),
    "pad_token_id: outside the vocabulary": (lambda rows: {**ENDS, "pad_token_id": VOCAB}, "native"),
    "pad_token_id: negative": (lambda rows: {**ENDS, "pad_token_id": -1}, "native"),
    "max_time: 0": (lambda rows: {"max_time": 0.0}, "orca"),
    "attention_mask: None": (lambda rows: {"attention_mask": None}, "orca"),
    "attention_mask: with holes": (
        lambda rows: {"attention_mask": torch.tensor([[1, 0] + [1] * 9] * rows)}, "native"),
    "attention_mask: right padding": (
        lambda rows: {"attention_mask": torch.tensor([[1] * 10 + [0]] * rows)}, "native"),
    "position_ids": (lambda rows: {"position_ids": torch.arange(11).expand(rows, -1)}, "native"),
    "inputs_embeds": (
        lambda rows: {"inputs_embeds": torch.ones(rows, 4, 48), "attention_mask": None, "input_ids": None}, "native"),
    "tokenizer": (lambda rows: {"tokenizer": TOKENIZERS["letters"]}, "orca"),
    "trust_remote_code": (lambda rows: {"trust_remote_code": True}, "orca"),
    "do_sample, top_k 1": (lambda rows: {"do_sample": True, "top_k": 1}, "orca"),
    "num_return_sequences: greedy": (lambda rows: {"num_return_sequences": 2}, "refused"),
    "num_beams: 1": (lambda rows: {"num_beams": 1}, "orca"),
    "num_beams: with a streamer": (lambda rows: {"num_beams": 2, "streamer": Heard()}, "native"),
    "temperature: 0": (lambda rows: {"do_sample": True, "temperature": 0.0}, "refused"),
    "return_dict": (lambda rows: {"return_dict": True}, "refused"),
    "an unknown argument": (lambda rows: {"no_such_argument": 1}, "native"),
    "custom_generate: no such folder": (lambda rows: {"custom_generate": "/no/such"}, "native"),
    **{f"cache_implementation: {name}": (lambda rows, name=name: {"cache_implementation": name}, runs_by)
       for name, runs_by in {"dynamic": "orca", "hybrid": "orca", "offloaded": "native", "quantized": "native",
                             "static": "native", "offloaded_static": "native", "sliding_window": "native",
                             "nonsense": "refused"}.items()},
}  # fmt: skip


@pytest.fixture(scope="module")
def twins():
    return make_twins()


def test_every_field_and_argument_has_been_decided():
    assert set(vars(GenerationConfig())) - NOT_OPTIONS == set(FIELDS)
    assert set(inspect.signature(GenerationMixin.generate).parameters) - {"self"} == set(ARGUMENTS)


def generate(model, call):
    call = dict(call)
    how = call.pop("in", None)
    return how(model.generate, **call) if how else model.generate(**call)


def check(twins, record_property, option, options_of, runs_by):
    """One row and several, natively and wrapped; then what explain() says is held against what was done."""
    results, reasons = set(), ()
    for rows in (1, len(PROMPTS)):
        calls = []
        for _ in range(3):  # each gets streamers and processors of its own
            made = {"max_new_tokens": 8, "do_sample": False, **pad_left(PROMPTS[:rows]), **options_of(rows)}
            if "generation_config" in made:
                del made["max_new_tokens"], made["do_sample"]
            calls.append({name: value for name, value in made.items() if value is not None or name == "pad_token_id"})
        native = outcome(lambda call=calls[0]: generate(twins[0], call))
        before = num_iterations(twins[1])
        ours = outcome(lambda call=calls[1]: generate(twins[1], call))
        iterations = num_iterations(twins[1]) - before
        assert_same(native.result, ours.result)
        assert ours.next_random == native.next_random
        explained = outcome(
            lambda call=calls[2]: orca_hf.explain(twins[1], **{k: v for k, v in call.items() if k != "in"})
        )
        results.add("same error" if isinstance(native.result, Exception) else "equal")
        if runs_by == "refused":
            assert_same(native.result, explained.result)
            reasons = (f"generate() itself refuses it: {type(native.result).__name__}",)
            continue
        reasons = explained.result.reasons
        assert explained.result.runs_by == runs_by, explained.result
        if not isinstance(native.result, Exception):
            assert (iterations > 0) == (runs_by == "orca")
    row = {"option": option, "runs by": "orca" if runs_by == "orca" else "native", "reason": "; ".join(reasons)}
    record_property("options", {**row, "result": min(results)})  # "equal" if with any number of rows it is


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_gives_what_it_gives_natively(twins, record_property, name):
    value, beside, runs_by = FIELDS[name]
    check(twins, record_property, name, lambda rows: {**beside, name: value}, runs_by)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_gives_what_it_gives_natively(twins, record_property, name):
    check(twins, record_property, f"{name}=", *ARGUMENTS[name])


@pytest.mark.parametrize("name", OBJECTS)
def test_an_object_gives_what_it_gives_natively(twins, record_property, name):
    check(twins, record_property, name, *OBJECTS[name])


def test_paged_attention_is_natives(twins, monkeypatch):
    """Not run to its end here: natively it takes a minute of waiting."""
    given = []

    def generate_batch(self, inputs, **kwargs):
        given.append(inputs)
        raise ZeroDivisionError

    for model in twins:
        monkeypatch.setattr(type(model), "generate_batch", generate_batch)
        with pytest.raises(ZeroDivisionError):
            model.generate(**pad_left(PROMPTS), cache_implementation="paged", max_new_tokens=3)
    assert given[0] == given[1]
    assert orca_hf.explain(twins[1], cache_implementation="paged").runs_by == "native"


@pytest.mark.parametrize("where", ["generation_config", "model.generation_config", "both, kwargs win"])
def test_the_same_fields_count_wherever_they_are_given(twins, where):
    """kwargs are merged into a configuration natively; given as one, a field must not slip through."""
    plain = [model.generation_config for model in twins]
    for name, (value, beside, runs_by) in FIELDS.items():
        fields = {"max_new_tokens": 4, **beside, name: value}
        tokenizer = {"tokenizer": fields.pop("tokenizer")} if "tokenizer" in fields else {}
        call = {**pad_left(PROMPTS[:2]), **tokenizer}
        try:
            config = GenerationConfig(pad_token_id=fields.pop("pad_token_id", 0), **fields)
        except ValueError:
            continue  # natively no such configuration can be made
        if where == "model.generation_config":
            for model in twins:
                model.generation_config = config
            if name == "stop_strings":
                runs_by = "native"  # they cannot be taken out of the model's own
        else:
            call["generation_config"] = config
        if where.startswith("both"):
            call["max_new_tokens"] = 3
        native, ours = (outcome(lambda model=model, call=call: model.generate(**call)) for model in twins)
        assert_same(native.result, ours.result)
        if not isinstance(native.result, Exception):
            assert orca_hf.explain(twins[1], **call).runs_by == runs_by, name
    for model, config in zip(twins, plain, strict=True):
        model.generation_config = config
