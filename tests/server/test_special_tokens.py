"""Promise: special tokens in a client's text are what the operator says: real, as natively, or text."""

import copy

import httpx
import pytest
from live import FakeEngine, faked
from tokenizers_tiny import KINDS, TEMPLATE, byte_level, words

TOKENIZER = byte_level()
SPLITTING = copy.deepcopy(TOKENIZER)
USER = {"role": "user", "content": "ok"}
TEXTS = [
    "<eos>",
    "ok<eos>ends",
    "<bos><eos>",
    " <eos> ",
    "<bo<eos>s>",
    "<<eos>>",
    "<eos",
    "ok\n<pad>",
    "漢<eos>😀",
    "ok",
]
SPECIAL = {TOKENIZER.convert_tokens_to_ids(name) for name in ("<bos>", "<eos>", "<pad>")}


@pytest.fixture(scope="module")
def natural():
    with faked(FakeEngine([5]), TOKENIZER, max_model_len=500) as running:
        yield running


@pytest.fixture(scope="module")
def plain():
    with faked(FakeEngine([5]), TOKENIZER, max_model_len=500, special_tokens_in_text=False) as running:
        yield running


def tokenize(running, **body):
    answer = httpx.post(f"{running.url}/tokenize", json=body)
    return answer.json().get("tokens", answer)


def submitted(running, path, **body):
    """The prompt that reaches the engine."""
    engine = running.service.engine
    before = len(engine.handles)
    assert httpx.post(f"{running.url}{path}", json={"max_tokens": 1, **body}).status_code == 200
    return engine.wait_for(before + 1)[before].given["prompt"]


def split(text):
    return SPLITTING(text, add_special_tokens=False, split_special_tokens=True).input_ids


@pytest.mark.parametrize("text", TEXTS)
def test_they_are_real_as_natively_unless_the_operator_says_otherwise(natural, text):
    chat = [{"role": "user", "content": text}]
    native = TOKENIZER.apply_chat_template(chat, add_generation_prompt=True, return_dict=True).input_ids
    assert tokenize(natural, messages=chat) == submitted(natural, "/v1/chat/completions", messages=chat) == native
    assert tokenize(natural, prompt=text) == submitted(natural, "/v1/completions", prompt=text)
    assert tokenize(natural, prompt=text) == TOKENIZER(text).input_ids


@pytest.mark.parametrize("text", TEXTS)
def test_then_a_prompt_has_none_but_its_tokenizers(plain, text):
    got = tokenize(plain, prompt=text)
    assert got == submitted(plain, "/v1/completions", prompt=[text]) == split(text)
    assert not SPECIAL & set(got)
    assert TOKENIZER.decode(got) == text.replace("<", "").replace(">", "")  # which its vocabulary does not have


@pytest.mark.parametrize("text", TEXTS)
def test_and_a_chat_has_none_but_its_templates(plain, text):
    chat = [{"role": "system", "content": text}, {"role": "user", "content": "ok " + text}]
    got = tokenize(plain, messages=chat)
    assert got == submitted(plain, "/v1/chat/completions", messages=chat)
    bos, eos = TOKENIZER.bos_token_id, TOKENIZER.eos_token_id
    # Written out: the template's tokens, and between them its text and the client's, encoded as text.
    turns = [bos, *split("s:" + text), eos, bos, *split("u:ok " + text), eos]
    assert got == [*turns, bos, *split("a:")]


def test_without_special_tokens_nothing_changes(natural, plain):
    for chat in ([USER], [USER, {"role": "assistant", "content": "é 😀"}, USER]):
        assert tokenize(plain, messages=chat) == tokenize(natural, messages=chat)
    assert tokenize(plain, prompt="ok, 漢") == tokenize(natural, prompt="ok, 漢")


def test_a_template_that_changes_the_text_still_works(plain):
    tokenizer = byte_level()
    tokenizer.chat_template = TEMPLATE.replace("message['content']", "message['content'] | trim | replace('k', 'kk')")
    with faked(FakeEngine([5]), tokenizer, special_tokens_in_text=False) as running:
        got = tokenize(running, messages=[{"role": "user", "content": "  ok<eos> "}])
    bos, eos = TOKENIZER.bos_token_id, TOKENIZER.eos_token_id
    assert got == [bos, *split("u:okk<eos>"), eos, bos, *split("a:")]


def test_a_role_or_a_name_is_a_clients_text_too(plain):
    chat = [{"role": "user", "content": "ok", "name": "<eos>"}]
    assert tokenize(plain, messages=chat) == tokenize(plain, messages=[USER])
    tokenizer = byte_level()
    tokenizer.chat_template = "<bos>{{ messages[0].role }}{{ messages[0].name }}"
    with faked(FakeEngine([5]), tokenizer, special_tokens_in_text=False) as running:
        got = tokenize(running, messages=[{"role": "<eos>", "content": "ok", "name": "<bos>"}])
    assert got == [TOKENIZER.bos_token_id, *split("<eos><bos>")]


@pytest.mark.parametrize("kind", KINDS)
def test_a_tokenizer_that_can_write_it_no_other_way_refuses_rather_than_writes_it(kind):
    tokenizer = copy.deepcopy(KINDS[kind])
    tokenizer.chat_template = TEMPLATE
    special = {tokenizer.bos_token_id, tokenizer.eos_token_id}
    with faked(FakeEngine([5]), tokenizer, max_model_len=500, special_tokens_in_text=False) as running:
        for body in ({"prompt": "b <eos> s"}, {"messages": [{"role": "user", "content": "b <eos> s"}]}):
            got = tokenize(running, **body)
            if not isinstance(got, list):
                assert (got.status_code, "special token" in got.text) == (400, True)
                continue
            allowed = 0 if "prompt" in body else 3  # the template's: two turns begin, one ends
            assert sum(token in special for token in got) == allowed


def test_the_words_tokenizer_is_one_of_those():
    with faked(FakeEngine([5]), words(), special_tokens_in_text=False) as running:
        assert tokenize(running, prompt="w5 <eos>").status_code == 400
        assert tokenize(running, prompt="w5 w6") == [5, 6]
