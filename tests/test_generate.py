"""Promise: whatever native generate() returns, the wrapped model's returns, option by option."""

import inspect
import logging

import pytest
import torch
from tiny import PROMPTS, VOCAB, make_model, pad_left
from tokenizers import Tokenizer, decoders, models
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation import GenerateDecoderOnlyOutput, MaxLengthCriteria

import orca_hf
from orca_hf import OrcaConfig

SMALL = OrcaConfig(max_batch_size=3, max_batch_tokens=7, max_slots=256, block_size=4)


@pytest.fixture(scope="module")
def twins():
    """A plain model and its wrapped twin."""
    return make_model(), orca_hf.wrap(make_model(), SMALL)


def both(twins, seed=0, **options):
    """The results of native and wrapped generate(), and the random number drawn after each."""
    results = []
    for model in twins:
        torch.manual_seed(seed)
        results.append((model.generate(**options), torch.rand(1).item()))
    return results


def assert_same(native, ours):
    assert type(ours) is type(native)
    if isinstance(native, torch.Tensor):
        assert ours.dtype == native.dtype
        assert ours.device == native.device
        assert torch.equal(ours, native)
        return
    assert set(ours.keys()) == set(native.keys())
    assert torch.equal(ours.sequences, native.sequences)
    for name in ("scores", "logits"):
        expected, found = getattr(native, name), getattr(ours, name)
        assert (found is None) == (expected is None)
        for ours_step, native_step in zip(found or (), expected or (), strict=True):
            torch.testing.assert_close(ours_step, native_step, atol=1e-4, rtol=1e-4)


class BanAfter(LogitsProcessor):
    """A stateful processor of a user's: forbids a token once it has been called three times."""

    def __init__(self):
        self.calls = []

    def __call__(self, input_ids, scores):
        self.calls.append((tuple(input_ids.shape), tuple(scores.shape)))
        scores = scores.clone()
        if len(self.calls) > 3:
            scores[0, ::2] = -float("inf")
        return scores


class WritesIntoTokens(LogitsProcessor):
    """Changes what it is shown, which natively are the tokens themselves."""

    def __call__(self, input_ids, scores):
        input_ids[:, 0] = input_ids.view(-1)[-1]
        return scores


class DrawsItself(LogitsProcessor):
    """Gumbel noise from the default generator."""

    def __call__(self, input_ids, scores):
        return scores - torch.rand_like(scores).log().neg().log()


class ColumnCriterion(StoppingCriteria):
    """Of the shape that transformers' documentation gives."""

    def __call__(self, input_ids, scores, **kwargs):
        return torch.zeros((input_ids.shape[0], 1), dtype=torch.bool)


class LaterLength(MaxLengthCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.max_length + 3)


class StopAt(StoppingCriteria):
    """A user's criterion that looks at all rows: each ends when the first row has an even token."""

    def __call__(self, input_ids, scores, **kwargs):
        even = input_ids[0, -1] % 2 == 0
        return even.repeat(input_ids.shape[0])


OPTIONS = {
    "greedy": {},
    "max_length": {"max_new_tokens": None, "max_length": 20},
    "default length": {"max_new_tokens": None},
    "eos": {"eos_token_id": 33},
    "eos list": {"eos_token_id": [33, 61, 80, 5, 17, 40, 41, 42]},
    "eos often": {"eos_token_id": list(range(3, 60))},
    "eos and min_new_tokens": {"eos_token_id": list(range(3, 60)), "min_new_tokens": 5},
    "eos and min_length": {"eos_token_id": list(range(3, 60)), "min_length": 16},
    "pad is another": {"eos_token_id": list(range(3, 60)), "pad_token_id": 7},
    "pad from eos": {"eos_token_id": 33, "pad_token_id": None},
    "repetition_penalty": {"repetition_penalty": 1.8},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.8},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 2},
    "bad_words_ids": {"bad_words_ids": [[33], [61, 4], [20, 21]]},
    "sequence_bias": {"sequence_bias": [[[33], -5.0], [[20, 21], 4.0]]},
    "suppress_tokens": {"suppress_tokens": list(range(10, 40)), "begin_suppress_tokens": [50, 51]},
    "forced_eos": {"forced_eos_token_id": 9, "eos_token_id": 9},
    "exponential decay": {"exponential_decay_length_penalty": (3, 1.4), "eos_token_id": 33},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": lambda batch, ids: [batch + 3, len(ids) % VOCAB, 50]},
    "renormalize": {"renormalize_logits": True, "repetition_penalty": 1.2},
    "processor of a user": {"logits_processor": lambda: LogitsProcessorList([BanAfter()])},
    "criterion of a user": {"stopping_criteria": lambda: StoppingCriteriaList([StopAt()])},
    "processor that writes into the tokens": {"logits_processor": lambda: LogitsProcessorList([WritesIntoTokens()])},
    "processor that draws": {"logits_processor": lambda: LogitsProcessorList([DrawsItself()]), "do_sample": True},
    "criterion and eos": {"stopping_criteria": lambda: StoppingCriteriaList([StopAt()]), "eos_token_id": 61},
    "several sequences": {"do_sample": True, "num_return_sequences": 3},
    "sample": {"do_sample": True},
    "sample, all warpers": {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01,
                            "typical_p": 0.95, "epsilon_cutoff": 3e-4, "eta_cutoff": 3e-4},
    "sample with eos": {"do_sample": True, "eos_token_id": list(range(3, 40))},
    "sample hot": {"do_sample": True, "temperature": 3.0, "top_k": 0},
    "scores": {"return_dict_in_generate": True, "output_scores": True},
    "scores, logits, eos": {"return_dict_in_generate": True, "output_scores": True, "output_logits": True,
                            "eos_token_id": list(range(3, 60)), "repetition_penalty": 1.3},
    "sampled scores": {"return_dict_in_generate": True, "output_scores": True, "do_sample": True, "eos_token_id": 33},
    "scores without dict": {"output_scores": True},
    "no cache": {"use_cache": False},
    "max_time": {"max_time": 100.0},
    "watermark": {"watermarking_config": {"greenlist_ratio": 0.5, "bias": 3.0}, "do_sample": True},
}  # fmt: skip
NATIVE_OPTIONS = {
    "beams": ({"num_beams": 2}, "beam_search"),
    "beams in a config": ({"generation_config": GenerationConfig(num_beams=2, max_new_tokens=6)}, "beam_search"),
    "prompt lookup": ({"prompt_lookup_num_tokens": 2, "rows": 1}, "assisted_generation"),
    "assistant": ({"assistant_model": "twin", "rows": 1}, "assisted_generation"),
    "static cache": ({"cache_implementation": "static"}, "cache_implementation"),
    "attentions": ({"return_dict_in_generate": True, "output_attentions": True}, "output_attentions"),
    "hidden states": ({"return_dict_in_generate": True, "output_hidden_states": True}, "output_hidden_states"),
    "guidance": ({"guidance_scale": 1.5}, "guidance_scale"),
    "beyond the positions": ({"max_new_tokens": 120}, "128 positions"),
}


def arguments(options, rows=len(PROMPTS), twin=None):
    made = {"max_new_tokens": 10, "do_sample": False, **pad_left(PROMPTS[:rows])}
    for name, value in options.items():
        is_factory = name in ("logits_processor", "stopping_criteria")
        made[name] = twin if value == "twin" else value() if is_factory else value
    if "generation_config" in made:
        for name in ("max_new_tokens", "do_sample"):
            del made[name]
    return made


@pytest.mark.parametrize("rows", [1, len(PROMPTS)])
@pytest.mark.parametrize("name", OPTIONS)
def test_option_by_orca_equals_native(twins, name, rows):
    (native, native_next), (ours, ours_next) = (both((model,), **arguments(OPTIONS[name], rows))[0] for model in twins)
    assert_same(native, ours)
    assert ours_next == native_next, "the default random generator is left where native leaves it"
    assert orca_hf.explain(twins[1], **arguments(OPTIONS[name], rows)).runs_by == "orca"


@pytest.mark.parametrize("name", NATIVE_OPTIONS)
def test_option_that_goes_native_equals_native_and_says_why(twins, name):
    options, reason = NATIVE_OPTIONS[name]
    rows = options.get("rows", len(PROMPTS))
    given = {key: value for key, value in options.items() if key != "rows"}
    made = arguments(given, rows, twin=make_model(seed=5))
    (native, _), (ours, _) = both(twins, **made)
    assert_same(native, ours)
    explanation = orca_hf.explain(twins[1], **made)
    assert explanation.runs_by == "native"
    assert reason in str(explanation)


def test_user_supplied_caches_and_embeddings_go_native(twins):
    prompt = torch.tensor([PROMPTS[0]])
    for model in twins:
        first = model.generate(prompt, max_new_tokens=3, do_sample=False, return_dict_in_generate=True)
        again = model.generate(first.sequences, cache=first.cache, max_new_tokens=3, do_sample=False)
        whole = model.generate(prompt, max_new_tokens=6, do_sample=False)
        assert torch.equal(again, whole)
        embeds = model.get_input_embeddings()(prompt)
        assert torch.equal(model.generate(inputs_embeds=embeds, max_new_tokens=6, do_sample=False), whole[:, -6:])


def test_the_returned_cache_is_natives(twins):
    (native, _), (ours, _) = both(
        twins, **arguments({"return_dict_in_generate": True, "eos_token_id": list(range(3, 60))})
    )
    assert ours.cache.get_seq_length() == native.cache.get_seq_length()
    mask = pad_left(PROMPTS)["attention_mask"].bool()
    padding = torch.nn.functional.pad(mask, (0, native.cache.get_seq_length() - mask.shape[1]), value=True)
    for ours_layer, native_layer in zip(ours.cache.layers, native.cache.layers, strict=True):
        for name in ("keys", "values"):
            found, expected = getattr(ours_layer, name), getattr(native_layer, name)
            assert found.shape == expected.shape
            seen = padding[:, None, :, None].expand_as(found)
            torch.testing.assert_close(found[seen], expected[seen], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("criterion", [ColumnCriterion, lambda: LaterLength(15)], ids=["column", "later length"])
@pytest.mark.parametrize("options", [{}, {"do_sample": True}, {"eos_token_id": 33}], ids=str)
def test_criteria_of_an_odd_kind_are_answered_as_natively(twins, criterion, options):
    results = []
    for model in twins:
        torch.manual_seed(0)
        made = {**arguments(options), "stopping_criteria": StoppingCriteriaList([criterion()])}
        try:
            results.append((model.generate(**made).tolist(), torch.rand(1).item()))
        except RuntimeError as error:
            results.append(str(error))
    assert results[0] == results[1]


MASKS = {
    "left": [[0, 0, 1, 1], [1, 1, 1, 1]],
    "none": [[1, 1, 1, 1], [1, 1, 1, 1]],
    "right": [[1, 1, 0, 0], [1, 1, 1, 1]],
    "hole": [[1, 0, 1, 1], [1, 1, 1, 1]],
    "both sides": [[0, 1, 1, 0], [1, 1, 1, 1]],
    "bool": [[False, True, True, True], [True, True, True, True]],
    "float": [[0.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]],
    "a row of padding": [[0, 0, 0, 0], [1, 1, 1, 1]],
}


@pytest.mark.parametrize("name", MASKS)
def test_padding_of_every_kind_equals_native(twins, name):
    batch = {
        "input_ids": torch.tensor([[11, 12, 13, 14], [21, 22, 23, 24]]),
        "attention_mask": torch.tensor(MASKS[name]),
    }
    (native, _), (ours, _) = both(twins, **batch, max_new_tokens=8, do_sample=False)
    assert torch.equal(ours, native)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.bool], ids=str)
def test_a_mask_of_any_dtype_counts_every_token(dtype):
    """297 tokens are no number in bf16, nor in eight bits."""
    prompt = torch.randint(3, VOCAB, (2, 300), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 300)
    mask[1, :3] = 0
    batch = {"input_ids": prompt, "attention_mask": mask.to(dtype), "max_new_tokens": 2, "do_sample": False}
    twins = make_model(max_position_embeddings=512), orca_hf.wrap(make_model(max_position_embeddings=512))
    assert_same(*(model.generate(**batch, return_dict_in_generate=True, output_logits=True) for model in twins))


def test_padding_without_a_mask_is_found_as_natively(twins):
    batch = {"input_ids": pad_left(PROMPTS)["input_ids"]}
    (native, _), (ours, _) = both(twins, **batch, max_new_tokens=8, do_sample=False)
    assert torch.equal(ours, native)


@pytest.mark.parametrize("shape", ["1-d", "positional", "kwargs", "int32", "from bos", "config object"])
def test_ways_to_give_the_input(twins, shape):
    prompt = torch.tensor([PROMPTS[0]])
    calls = {
        "1-d": lambda model: model.generate(prompt[0], max_new_tokens=4),
        "positional": lambda model: model.generate(prompt, GenerationConfig(max_new_tokens=4)),
        "kwargs": lambda model: model.generate(input_ids=prompt, max_new_tokens=4),
        "int32": lambda model: model.generate(prompt.int(), max_new_tokens=4),
        "from bos": lambda model: model.generate(max_new_tokens=4, bos_token_id=1),
        "config object": lambda model: model.generate(prompt, generation_config=GenerationConfig(max_new_tokens=4)),
    }
    results = []
    for model in twins:
        try:
            results.append(calls[shape](model))
        except Exception as error:
            results.append(error)
    if isinstance(results[0], Exception):
        assert type(results[1]) is type(results[0])
        assert str(results[1]) == str(results[0])
    else:
        assert_same(*results)


class Recorder:
    """A streamer that remembers what it was given."""

    def __init__(self):
        self.events = []

    def put(self, value):
        self.events.append(value.tolist())

    def end(self):
        self.events.append("end")


def test_the_stream_is_ended_when_generation_raises(twins):
    def fail(input_ids, scores):
        raise ZeroDivisionError

    for made in (arguments({}, 1), {"input_ids": torch.tensor([[999]])}):
        streamer = Recorder()
        with pytest.raises((ZeroDivisionError, IndexError)):
            twins[1].generate(**made, streamer=streamer, logits_processor=LogitsProcessorList([fail]))
        assert streamer.events.count("end") == 1
        assert streamer.events[-1] == "end"


def test_length_criteria_of_the_users_count_as_natively(twins):
    for lengths in ([14], [5], [18, 13], [26]):
        criteria = StoppingCriteriaList([MaxLengthCriteria(length) for length in lengths])
        for extra in ({}, {"repetition_penalty": 1.5}):
            made = arguments({"max_new_tokens": 4, **extra})
            assert_same(*(model.generate(**made, stopping_criteria=criteria) for model in twins))


@pytest.mark.parametrize("rows", [1, len(PROMPTS)])
def test_a_streamer_gets_what_it_gets_natively(twins, rows):
    heard = []
    for model in twins:
        streamer = Recorder()
        model.generate(**arguments({"eos_token_id": list(range(3, 40))}, rows), streamer=streamer)
        heard.append(streamer.events)
    assert heard[0] == heard[1]


def test_a_users_processor_is_called_as_natively(twins):
    """All rows at once, padding included, also after some have ended: it may keep state by row."""
    calls = []
    for model in twins:
        processor = BanAfter()
        made = arguments({"eos_token_id": list(range(3, 40))})
        model.generate(**made, logits_processor=LogitsProcessorList([processor]))
        calls.append(processor.calls)
    assert calls[0] == calls[1]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad], ids=lambda m: m.__name__)
def test_grad_modes(twins, mode):
    results = []
    for model in twins:
        with mode():
            results.append(model.generate(**arguments({"return_dict_in_generate": True, "output_scores": True})))
        assert torch.is_grad_enabled()
    assert_same(*results)
    assert results[1].sequences.is_inference() == results[0].sequences.is_inference()
    assert results[1].scores[0].is_inference() == results[0].scores[0].is_inference()
    # A call in another mode follows on the same engine.
    plain = arguments({"repetition_penalty": 1.5})
    assert_same(twins[0].generate(**plain), twins[1].generate(**plain))


def test_autocast(twins):
    results = []
    for model in twins:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            results.append(
                model.generate(**arguments({"return_dict_in_generate": True, "output_logits": True}, rows=1))
            )
    native, ours = results
    assert ours.logits[0].dtype == native.logits[0].dtype
    torch.testing.assert_close(ours.logits[0], native.logits[0], atol=0.1, rtol=0.05)
    plain = arguments({})
    assert_same(twins[0].generate(**plain), twins[1].generate(**plain))


def test_nothing_of_the_callers_is_changed(twins):
    _, model = twins
    batch = pad_left(PROMPTS)
    kept = {name: tensor.clone() for name, tensor in batch.items()}
    config = GenerationConfig(max_new_tokens=5, do_sample=True, eos_token_id=33)
    before = config.to_dict(), model.generation_config.to_dict(), model.config.to_dict(), model.training
    model.generate(**batch, generation_config=config)
    assert (config.to_dict(), model.generation_config.to_dict(), model.config.to_dict(), model.training) == before
    assert all(torch.equal(batch[name], kept[name]) for name in batch)
    assert model.config._attn_implementation == "sdpa"


def test_greedy_leaves_the_random_generator_alone(twins):
    torch.manual_seed(3)
    state = torch.get_rng_state()
    twins[1].generate(**arguments({}))
    assert torch.equal(torch.get_rng_state(), state)


def test_a_call_too_large_for_native_draws_is_sampled_row_by_row():
    """Rows that do not fit into the pool at once draw from streams of their own: same seed, same tokens."""
    model = orca_hf.wrap(make_model(), OrcaConfig(max_batch_size=2, max_slots=64, max_batch_tokens=8, block_size=8))
    made = {**pad_left(PROMPTS * 3), "max_new_tokens": 20, "do_sample": True}
    results = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        results.append(model.generate(**made))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])
    assert len({tuple(row.tolist()) for row in results[0][:, -20:]}) == 3 * len(PROMPTS)


def test_a_call_looked_at_as_a_whole_that_does_not_fit_goes_native(caplog):
    model = orca_hf.wrap(make_model(), OrcaConfig(max_batch_size=2, max_slots=64, max_batch_tokens=8, block_size=8))
    made = {**pad_left(PROMPTS), "max_new_tokens": 20, "do_sample": False}
    options = {"return_dict_in_generate": True, "output_scores": True}
    assert_same(make_model().generate(**made, **options), model.generate(**made, **options))
    assert "do not fit" in caplog.text


def test_signature_and_messages_of_generate_are_kept(twins):
    native, ours = twins
    assert inspect.signature(ours.generate) == inspect.signature(native.generate)
    for call in (
        lambda m: m.generate(torch.tensor([[1]]), no_such_argument=1),
        lambda m: m.generate(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12),
    ):
        messages = []
        for model in twins:
            with pytest.raises((TypeError, ValueError)) as caught:
                call(model)
            messages.append(type(caught.value))
        assert messages[0] is messages[1]


def test_stop_strings():
    letters = {chr(97 + i % 26) * (1 + i // 26): i for i in range(VOCAB)}
    backend = Tokenizer(models.BPE(letters, []))
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    native, ours = make_model(), orca_hf.wrap(make_model(), SMALL)
    said = native.generate(**pad_left(PROMPTS), max_new_tokens=10, do_sample=False)[:, -6:]
    words = [tokenizer.convert_ids_to_tokens(row.tolist()) for row in said]
    for stop in (words[0][0][:1], words[0][1] + words[0][2], ["zzzz", words[1][2], words[2][3][-1:] + words[2][4][:1]]):
        for rows, extra in ((1, {}), (5, {"eos_token_id": 33}), (5, {})):
            made = arguments({"stop_strings": stop, **extra}, rows)
            assert_same(native.generate(**made, tokenizer=tokenizer), ours.generate(**made, tokenizer=tokenizer))
            config = GenerationConfig(stop_strings=stop, max_new_tokens=10, **extra)
            batch = pad_left(PROMPTS[:rows])
            assert_same(
                native.generate(**batch, generation_config=config, tokenizer=tokenizer),
                ours.generate(**batch, generation_config=config, tokenizer=tokenizer),
            )
            assert config.stop_strings == stop
    for model in (native, ours):
        with pytest.raises(ValueError, match="tokenizer"):
            model.generate(torch.tensor([PROMPTS[0]]), stop_strings="a")


def test_reasons_are_logged_once_and_by_the_librarys_logger(caplog):
    model = orca_hf.wrap(make_model())
    for _ in range(3):
        model.generate(torch.tensor([PROMPTS[0]]), num_beams=2, max_new_tokens=2)
    records = [record for record in caplog.records if "beam_search" in record.message]
    assert len(records) == 1
    assert records[0].name.startswith("orca_hf")
    assert records[0].levelno == logging.WARNING


def test_results_are_of_natives_type(twins):
    (native, _), (ours, _) = both(twins, **arguments({"return_dict_in_generate": True}))
    assert type(native) is type(ours) is GenerateDecoderOnlyOutput
