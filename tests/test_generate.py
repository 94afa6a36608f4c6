"""Promise: whatever native generate() returns, the wrapped model's returns, however the call is made.

The options are in test_options.py and test_option_combinations.py.
"""

import inspect
import logging

import pytest
import torch
from oracle import assert_same, assert_same_outcome, make_twins, num_iterations
from tiny import PROMPTS, VOCAB, make_model, pad_left
from transformers import GenerationConfig
from transformers.generation import GenerateDecoderOnlyOutput

import orca_hf
from orca_hf import OrcaConfig

ENDS = {"eos_token_id": list(range(3, 60))}


@pytest.fixture(scope="module")
def twins():
    return make_twins()


def made(rows=len(PROMPTS), **options):
    return {"max_new_tokens": 10, "do_sample": False, **pad_left(PROMPTS[:rows]), **options}


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
    native, ours = (model.generate(**made(return_dict_in_generate=True, **ENDS)) for model in twins)
    assert ours.cache.get_seq_length() == native.cache.get_seq_length()
    mask = pad_left(PROMPTS)["attention_mask"].bool()
    padding = torch.nn.functional.pad(mask, (0, native.cache.get_seq_length() - mask.shape[1]), value=True)
    for ours_layer, native_layer in zip(ours.cache.layers, native.cache.layers, strict=True):
        for name in ("keys", "values"):
            found, expected = getattr(ours_layer, name), getattr(native_layer, name)
            assert found.shape == expected.shape
            seen = padding[:, None, :, None].expand_as(found)
            torch.testing.assert_close(found[seen], expected[seen], atol=1e-4, rtol=1e-4)


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
    assert_same_outcome(twins, lambda model: model.generate(**batch, max_new_tokens=8, do_sample=False))


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
    assert_same_outcome(twins, lambda model: model.generate(**batch, max_new_tokens=8, do_sample=False))


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
    assert_same_outcome(twins, calls[shape])


def test_what_explain_says_of_rows_is_what_happens(twins):
    """Padding that natively is found without a mask, and memory, are seen only when generate() prepares the call."""
    cases = {
        "padded on the right": {"input_ids": torch.tensor([[5, 6, 0], [7, 8, 9]])},
        "holes": {"input_ids": torch.tensor([[5, 0, 6], [7, 8, 9]])},
        "do not fit": {**pad_left(PROMPTS * 8), "return_dict_in_generate": True, "output_scores": True},
        "outside the vocabulary": {**pad_left(PROMPTS), **ENDS, "pad_token_id": VOCAB},
        "": {"input_ids": torch.tensor([[5, 6, 0], [7, 8, 9]]), "pad_token_id": None},
    }
    model = twins[1]
    for reason, call in cases.items():
        explanation = orca_hf.explain(model, **call, max_new_tokens=6, do_sample=False)
        before = num_iterations(model)
        assert_same_outcome(twins, lambda m, call=call: m.generate(**call, max_new_tokens=6, do_sample=False))
        assert explanation.runs_by == ("native" if reason else "orca"), reason
        assert reason in str(explanation)
        assert (num_iterations(model) == before) == bool(reason)


@pytest.mark.parametrize("options", [{"use_cache": False}, {}], ids=["no cache", "cache"])
def test_autocast(twins, options):
    """Weights in fp32 under autocast in bf16: K and V are narrowed as natively, but a returned cache would not be."""
    results = []
    for model in twins:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            call = made(1, return_dict_in_generate=True, output_logits=True, **options)
            results.append(model.generate(**call))
            if model is twins[1]:
                explanation = orca_hf.explain(model, return_dict_in_generate=True, **options)
                assert explanation.runs_by == "orca" if options else "under autocast" in str(explanation)
    native, ours = results
    assert ours.logits[0].dtype == native.logits[0].dtype
    torch.testing.assert_close(ours.logits[0], native.logits[0], atol=0.1, rtol=0.05)
    plain = made()
    assert_same(twins[0].generate(**plain), twins[1].generate(**plain))


def test_labels_change_nothing(twins):
    """Seq2SeqTrainer hands its batch over as it is; natively labels are left out of every forward."""
    batch = made()
    labels = torch.full_like(batch["input_ids"], 9)
    assert_same_outcome(twins, lambda model: model.generate(**batch, labels=labels))
    assert_same(twins[0].generate(**batch), twins[1].generate(**batch, labels=labels))
    assert orca_hf.explain(twins[1], **batch, labels=labels).runs_by == "orca"


def test_a_call_looked_at_as_a_whole_that_does_not_fit_goes_native(caplog):
    model = orca_hf.wrap(make_model(), OrcaConfig(max_batch_size=2, max_slots=64, max_batch_tokens=8, block_size=8))
    call = made(max_new_tokens=20, return_dict_in_generate=True, output_scores=True)
    assert_same(make_model().generate(**call), model.generate(**call))
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


def test_reasons_are_logged_once_and_by_the_librarys_logger(caplog):
    model = orca_hf.wrap(make_model())
    for _ in range(3):
        model.generate(torch.tensor([PROMPTS[0]]), num_beams=2, max_new_tokens=2)
    records = [record for record in caplog.records if "beam_search" in record.message]
    assert len(records) == 1
    assert records[0].name.startswith("orca_hf")
    assert records[0].levelno == logging.WARNING


def test_results_are_of_natives_type(twins):
    native, ours = (model.generate(**made(return_dict_in_generate=True)) for model in twins)
    assert type(native) is type(ours) is GenerateDecoderOnlyOutput
