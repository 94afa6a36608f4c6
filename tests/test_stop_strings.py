"""Promise: stop strings end a row where native generate() ends it, however tokens and bytes cut them."""

import pytest
import torch
from oracle import assert_same, assert_same_outcome, make_twins, num_iterations
from tiny import PROMPTS, VOCAB, pad_left
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, StoppingCriteriaList
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.generation import StopStringCriteria

import orca_hf

# What the model of random weights says is arbitrary; the vocabulary is laid over it so that it says these bytes.
TEXT = "naïve é 😀 ok, stop! ünïcode 漢字 ends. "


def byte_level():
    """97 tokens of one to three bytes, cut without regard to characters: é and 😀 are several tokens."""
    byte = bytes_to_unicode()
    data = TEXT.encode()
    pieces = [data[i : i + 1 + i % 3] for i in range(len(data))] + [bytes([b]) for b in data]
    names = list(dict.fromkeys("".join(byte[b] for b in piece) for piece in pieces))
    names += [f"{chr(97 + i % 26)}{chr(97 + i // 26)}" for i in range(26 * 26)]
    names = list(dict.fromkeys(names))[:VOCAB]
    backend = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def letters():
    """Tokens of one to four letters, each of one of the alphabet's."""
    names = {chr(97 + i % 26) * (1 + i // 26): i for i in range(VOCAB)}
    backend = Tokenizer(models.BPE(names, []))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


TOKENIZERS = {"bytes": byte_level(), "letters": letters()}
PROMPT_LEN = len(PROMPTS[0])


@pytest.fixture(scope="module")
def twins():
    return make_twins()


def said(twins, tokenizer, row, start, stop):
    """The bytes of some tokens that the model says, or of its prompt if `start` is negative."""
    tokens = twins[0].generate(**pad_left(PROMPTS), max_new_tokens=10, do_sample=False)[row].tolist()
    names = tokenizer.convert_ids_to_tokens(tokens[PROMPT_LEN + start : PROMPT_LEN + stop])
    byte = {char: b for b, char in bytes_to_unicode().items()}
    return bytes(byte[char] for name in names for char in name)


def as_text(data):
    return data.decode(errors="ignore")


STOPS = {
    "one letter": lambda say: say(0, 2, 3)[:1],
    "over two tokens": lambda say: say(1, 3, 5),
    "over four tokens, from within to within": lambda say: say(3, 2, 6)[1:-1] or say(3, 2, 6),
    "over the end of the prompt": lambda say: say(3, -2, 2),
    "in the prompt alone": lambda say: say(3, -3, 0),
    "the first token": lambda say: say(4, 0, 1),
    "never": lambda say: b"zzzz",
    "several": lambda say: [b"zzzz", say(1, 4, 5), say(2, 6, 8), say(0, 8, 9)[-1:]],
}
BESIDE = {
    "greedy": {},
    "eos": {"eos_token_id": list(range(30, 60)), "pad_token_id": 4},
    "sampled": {"do_sample": True, "eos_token_id": [33]},
    "scores": {"return_dict_in_generate": True, "output_scores": True, "eos_token_id": [33]},
}


@pytest.mark.parametrize("rows", [1, len(PROMPTS)])
@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_stop_string_ends_rows_as_natively(twins, kind, stop, beside, rows):
    tokenizer = TOKENIZERS[kind]
    stops = STOPS[stop](lambda *where: said(twins, tokenizer, *where))
    stops = [as_text(each) for each in (stops if isinstance(stops, list) else [stops])]
    made = {**pad_left(PROMPTS[:rows]), "max_new_tokens": 10, "do_sample": False, **BESIDE[beside]}
    made |= {"stop_strings": stops if len(stops) > 1 else stops[0], "tokenizer": tokenizer}
    before = num_iterations(twins[1])
    native = assert_same_outcome(twins, lambda model: model.generate(**made)).result
    if not isinstance(native, Exception):  # an empty one, of bytes that are no text, is refused natively
        assert num_iterations(twins[1]) > before
        assert orca_hf.explain(twins[1], **made).runs_by == "orca"


@pytest.mark.parametrize("stop", ["é", "😀", "ï", "漢字", "😀 ok", "e é"])
def test_characters_cut_into_several_tokens_are_found_as_natively(twins, stop):
    """The model is made to say TEXT, byte by byte, in a row of its own rhythm."""
    tokenizer = TOKENIZERS["bytes"]
    byte = bytes_to_unicode()
    says = tokenizer.convert_tokens_to_ids([byte[b] for b in TEXT.encode()])
    assert all(isinstance(token, int) for token in says)
    assert len(says) > len(TEXT)

    def script(batch_id, tokens):
        step = len(tokens) - PROMPT_LEN
        return [says[(step + 5 * batch_id) % len(says)]]

    made = {**pad_left(PROMPTS), "max_new_tokens": len(says), "do_sample": False, "eos_token_id": 96}
    call = {**made, "prefix_allowed_tokens_fn": script, "stop_strings": [stop], "tokenizer": tokenizer}
    native = assert_same_outcome(twins, lambda model: model.generate(**call)).result
    first = tokenizer.decode(native[0, PROMPT_LEN:], clean_up_tokenization_spaces=False)
    assert stop in first
    assert first.index(stop) == TEXT.index(stop)


@pytest.mark.parametrize("how", ["config", "config and kwargs", "criterion", "both", "model's config"])
def test_ways_to_give_stop_strings(how):
    twins = make_twins()
    tokenizer = TOKENIZERS["letters"]
    stops = [as_text(said(twins, tokenizer, 1, 3, 5)), as_text(said(twins, tokenizer, 0, 6, 7))]
    batch = {**pad_left(PROMPTS), "tokenizer": tokenizer}
    config = GenerationConfig(stop_strings=stops, max_new_tokens=10)

    def call(model):
        if how == "config":
            return model.generate(**batch, generation_config=config)
        if how == "config and kwargs":
            return model.generate(**batch, generation_config=config, stop_strings=stops[0], max_new_tokens=9)
        if how == "model's config":
            model.generation_config.stop_strings = stops
            return model.generate(**batch, max_new_tokens=10)
        criteria = StoppingCriteriaList([StopStringCriteria(tokenizer, stops[1])])
        more = {"stop_strings": stops[0]} if how == "both" else {}
        return model.generate(**batch, max_new_tokens=10, stopping_criteria=criteria, **more), len(criteria)

    assert_same_outcome(twins, call)
    assert config.stop_strings == stops


@pytest.mark.parametrize("stops", ["a", [], "", ["a", 3], 7], ids=str)
@pytest.mark.parametrize("tokenizer", [None, TOKENIZERS["letters"], 3], ids=["none", "letters", "no tokenizer"])
def test_stop_strings_that_cannot_be_fail_as_natively(twins, stops, tokenizer):
    made = {"input_ids": torch.tensor([PROMPTS[0]]), "max_new_tokens": 4, "do_sample": False}
    outcomes = []
    for model in twins:
        try:
            outcomes.append(model.generate(**made, stop_strings=stops, tokenizer=tokenizer))
        except Exception as error:
            outcomes.append(error)
    assert_same(*outcomes)
