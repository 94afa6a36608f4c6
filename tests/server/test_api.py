"""Promise: over HTTP, by OpenAI's own client, comes what native generate() gives alone, whatever else runs."""

import json
import math
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from live import live
from openai import BadRequestError, NotFoundError
from tiny import make_model
from tokenizers_tiny import byte_level

import orca_hf

VOCAB = 120
TOKENIZER = byte_level(VOCAB)
EOS = TOKENIZER.eos_token_id
CHAT = [{"role": "system", "content": "ok"}, {"role": "user", "content": [{"type": "text", "text": "naïve 😀"}]}]
GREEDY = {"model": "tiny", "temperature": 0}


def tiny():
    model = make_model("llama", vocab_size=VOCAB, max_position_embeddings=256)
    model.generation_config.eos_token_id = EOS
    return model


@pytest.fixture(scope="module")
def served():
    model = tiny()
    with live(orca_hf.engine(model), model, TOKENIZER, max_model_len=256) as running:
        yield running


@pytest.fixture
def client(served):
    return served.openai()


@pytest.fixture(scope="module")
def native():
    model = tiny()

    def generate(prompt, seed=None, **options):
        """(new tokens, logits of each) of native generate() alone."""
        if seed is not None:
            torch.manual_seed(seed)
        output = model.generate(
            torch.tensor([prompt]), return_dict_in_generate=True, output_logits=True,
            **{"do_sample": seed is not None, "max_new_tokens": 16, **options},
        )  # fmt: skip
        return output.sequences[0, len(prompt) :].tolist(), torch.cat(output.logits)

    generate.model = model
    return generate


def tokens_of(text):
    return TOKENIZER(text, add_special_tokens=False).input_ids


def text_of(prompt, tokens):
    """What `tokens` add to the prompt's text."""
    before = TOKENIZER.decode(prompt, skip_special_tokens=True)
    return TOKENIZER.decode([*prompt, *tokens], skip_special_tokens=True).removeprefix(before)


PROMPTS = {
    "text": ("stop! ok", [tokens_of("stop! ok")]),
    "texts": (["ok", "ends. 漢"], [tokens_of("ok"), tokens_of("ends. 漢")]),
    "tokens": (tokens_of("nds"), [tokens_of("nds")]),
    "lists of tokens": ([tokens_of(text) for text in ("a", "bc")], [tokens_of(text) for text in ("a", "bc")]),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("form", PROMPTS)
def test_a_greedy_completion_is_native(client, native, form, stream):
    given, prompts = PROMPTS[form]
    got = client.completions.create(prompt=given, max_tokens=24, stream=stream, **GREEDY)
    texts, reasons = collected(got, stream, lambda choice: choice.text)
    expected = [native(prompt, max_new_tokens=24)[0] for prompt in prompts]
    assert texts == [text_of(prompt, tokens) for prompt, tokens in zip(prompts, expected, strict=True)]
    assert reasons == ["stop" if tokens[-1] == EOS else "length" for tokens in expected]
    if not stream:
        assert got.usage.prompt_tokens == sum(map(len, prompts))
        assert got.usage.completion_tokens == sum(map(len, expected))


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_is_native_on_its_template(client, native, stream, limit):
    plain = [CHAT[0], {"role": "user", "content": "naïve 😀"}]
    prompt = TOKENIZER.apply_chat_template(plain, add_generation_prompt=True, return_dict=True).input_ids
    got = client.chat.completions.create(messages=CHAT, stream=stream, **{limit: 20}, **GREEDY)
    texts, reasons = collected(got, stream, lambda choice: (choice.delta if stream else choice.message).content)
    tokens, _ = native(prompt, max_new_tokens=20)
    assert texts == [text_of(prompt, tokens)]
    assert reasons == ["stop" if tokens[-1] == EOS else "length"]


def test_clients_at_once_share_iterations_and_get_what_they_would_alone(served, native):
    prompts = [[*tokens_of("ok ends"), 10 + i] for i in range(12)]
    create = served.openai().completions.create
    with ThreadPoolExecutor(12) as pool:
        got = list(pool.map(lambda prompt: create(prompt=prompt, max_tokens=40, **GREEDY), prompts))
    for answer, prompt in zip(got, prompts, strict=True):
        assert answer.choices[0].text == text_of(prompt, native(prompt, max_new_tokens=40)[0])
    with served.http() as http:
        assert max(len(each["shares"]) for each in http.get("/status.json").json()["recent"]) > 1


def collected(got, stream, text):
    """Texts and finish reasons, by index."""
    texts, reasons = {}, {}
    for part in got if stream else [got]:
        for choice in part.choices:
            texts[choice.index] = texts.get(choice.index, "") + text(choice)
            if choice.finish_reason:
                assert choice.index not in reasons
                reasons[choice.index] = choice.finish_reason
    return [texts[i] for i in range(len(texts))], [reasons[i] for i in range(len(texts))]


SAMPLED = {
    "temperature": ({"temperature": 0.7}, {}),
    "high temperature": ({"temperature": 2.0}, {}),
    "top_p": ({"temperature": 1.0, "top_p": 0.6}, {}),
    "top_k": ({"temperature": 1.0}, {"top_k": 5}),
    "all of top_k": ({"temperature": 1.0}, {"top_k": -1}),
    "min_p": ({"temperature": 1.0}, {"min_p": 0.2}),
    "repetition_penalty": ({"temperature": 1.0}, {"repetition_penalty": 1.8}),
}


@pytest.mark.parametrize("case", SAMPLED)
def test_a_seed_gives_natives_draws(client, native, case):
    plain, extra = SAMPLED[case]
    options = {**plain, **{key: max(value, 0) for key, value in extra.items()}}
    got = client.completions.create(model="tiny", prompt="ok", seed=7, n=3, max_tokens=16, extra_body=extra, **plain)
    prompt = tokens_of("ok")
    expected = [text_of(prompt, native(prompt, seed, **options)[0]) for seed in (7, 8, 9)]
    assert [choice.text for choice in got.choices] == expected
    assert len(set(expected)) > 1


def test_without_a_seed_answers_differ(client):
    got = client.completions.create(model="tiny", prompt="ok", n=8, max_tokens=16, temperature=1.5)
    assert len({choice.text for choice in got.choices}) > 1


def test_what_a_request_leaves_out_is_the_models_own(client, native):
    prompt = tokens_of("ok")
    got = client.completions.create(model="tiny", prompt="ok")
    assert got.choices[0].text == text_of(prompt, native(prompt)[0])  # greedy, 16 tokens


def test_openais_penalties_are_openais(client, native):
    def penalised(prompt, presence, frequency):
        tokens = []
        for _ in range(20):
            logits = native.model(torch.tensor([prompt + tokens])).logits[0, -1]
            for token in set(tokens):
                logits[token] -= presence + frequency * tokens.count(token)
            tokens.append(int(logits.argmax()))
            if tokens[-1] == EOS:
                break
        return tokens

    prompt = tokens_of("ends")
    for presence, frequency in [(2, 0), (0, 2), (1.5, 0.5), (-1, 0), (0, -2)]:
        got = client.completions.create(
            prompt=prompt, presence_penalty=presence, frequency_penalty=frequency, max_tokens=20, **GREEDY
        )
        assert got.choices[0].text == text_of(prompt, penalised(prompt, presence, frequency))


def test_a_bias_forces_and_forbids_tokens(client):
    emoji = tokens_of("é")
    forced = client.completions.create(
        prompt="ok", logit_bias={str(emoji[0]): 100, emoji[1]: 90}, frequency_penalty=2, max_tokens=3, **GREEDY
    )
    free = client.completions.create(prompt="ok", max_tokens=1, logprobs=1, **GREEDY)
    first = free.choices[0].logprobs.tokens[0]
    (token,) = [i for i in range(VOCAB) if TOKENIZER.decode([i]) == first] or [None]
    forbidden = client.completions.create(prompt="ok", logit_bias={token: -100}, max_tokens=1, logprobs=1, **GREEDY)
    assert set(forced.choices[0].text) <= {"é", "\ufffd"}
    assert forbidden.choices[0].logprobs.tokens[0] != first


def test_no_end_of_sequence_ends_an_answer_that_ignores_it(client):
    biased = {"logit_bias": {EOS: 100}, "max_tokens": 9, **GREEDY}
    ended = client.completions.create(prompt="ok", **biased)
    assert (ended.choices[0].text, ended.choices[0].finish_reason, ended.usage.completion_tokens) == ("", "stop", 1)
    went_on = client.completions.create(prompt="ok", extra_body={"ignore_eos": True}, **biased)
    assert (went_on.choices[0].finish_reason, went_on.usage.completion_tokens) == ("length", 9)


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_pad_token_in_a_prompt_is_a_token(client, native, ignore_eos):
    prompt = [*tokens_of("ok"), TOKENIZER.pad_token_id, *tokens_of("ends")]
    mask = torch.ones(1, len(prompt), dtype=torch.long)
    tokens = native(prompt, attention_mask=mask, eos_token_id=None if ignore_eos else EOS)[0]
    got = client.completions.create(prompt=prompt, max_tokens=16, extra_body={"ignore_eos": ignore_eos}, **GREEDY)
    assert got.choices[0].text == text_of(prompt, tokens)
    assert text_of(prompt, tokens) != text_of(prompt, native(prompt)[0])


def test_the_engine_stops_with_a_stop_string(client, native):
    prompt = tokens_of("stop! ok")
    text = text_of(prompt, native(prompt, max_new_tokens=60)[0])
    stop = text[8:11]
    got = client.completions.create(prompt=prompt, stop=[stop, "never"], max_tokens=60, **GREEDY)
    assert got.choices[0].text == text[: text.index(stop)]
    assert got.choices[0].finish_reason == "stop"
    assert got.usage.completion_tokens < 60


def test_logprobs_are_those_of_native_logits(client, native):
    prompt = tokens_of("ok ok")
    tokens, logits = native(prompt, max_new_tokens=6)
    expected = torch.log_softmax(logits, dim=-1)
    got = client.completions.create(prompt=prompt, max_tokens=6, logprobs=3, **GREEDY).choices[0].logprobs
    torch.testing.assert_close(torch.tensor(got.token_logprobs), expected[range(6), tokens], atol=1e-4, rtol=1e-4)
    assert [len(top) for top in got.top_logprobs] == [3] * 6  # greedy tokens are among the likeliest
    assert [max(top.values()) for top in got.top_logprobs] == got.token_logprobs
    assert got.text_offset == [sum(map(len, got.tokens[:i])) for i in range(6)]


@pytest.mark.parametrize("stream", [False, True])
def test_a_chats_logprobs_name_each_token_and_its_bytes(client, native, stream):
    options = {"messages": CHAT, "max_tokens": 12, "logprobs": True, "top_logprobs": 2, "stream": stream, **GREEDY}
    got = client.chat.completions.create(**options)
    entries = [entry for part in (got if stream else [got]) for entry in part.choices[0].logprobs.content]
    prompt = TOKENIZER.apply_chat_template(
        [CHAT[0], {"role": "user", "content": "naïve 😀"}], add_generation_prompt=True, return_dict=True
    ).input_ids
    tokens, logits = native(prompt, max_new_tokens=12)
    expected = torch.log_softmax(logits, dim=-1).topk(2).values
    assert len(entries) == len(tokens)
    special = TOKENIZER.all_special_tokens
    data = b"".join(bytes(entry.bytes) for entry in entries if entry.token not in special)
    assert data.decode(errors="replace") == text_of(prompt, tokens)
    for entry, values in zip(entries, expected.tolist(), strict=True):
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx(values, abs=1e-4)
        assert entry.logprob == entry.top_logprobs[0].logprob
        assert entry.token == entry.top_logprobs[0].token


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_echo_tells_a_prompts_logprobs_too(client, native, max_tokens):
    prompts = [tokens_of("ok, 漢"), tokens_of("stop")]
    given = {"prompt": prompts, "echo": True, "logprobs": 2, "max_tokens": max_tokens, "n": 2, **GREEDY}
    got = client.completions.create(**given)
    streamed, _ = collected(client.completions.create(stream=True, **given), True, lambda choice: choice.text)
    assert [choice.text for choice in got.choices] == streamed
    assert [choice.index for choice in got.choices] == [0, 1, 2, 3]
    for choice in got.choices:
        prompt = prompts[choice.index // 2]
        tokens = native(prompt, max_new_tokens=max_tokens)[0] if max_tokens else []
        whole = prompt + tokens
        assert choice.text == TOKENIZER.decode(whole, skip_special_tokens=True)
        expected = torch.log_softmax(native.model(torch.tensor([whole])).logits[0, :-1], dim=-1)
        expected = expected[range(len(whole) - 1), whole[1:]].tolist()
        assert choice.logprobs.token_logprobs[0] is None
        assert choice.logprobs.top_logprobs[0] is None
        assert choice.logprobs.token_logprobs[1:] == pytest.approx(expected, abs=1e-3)
        assert all(math.isfinite(value) for top in choice.logprobs.top_logprobs[1:] for value in top.values())


def test_lm_eval_reads_our_logprobs(client, native):
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    context, continuation = tokens_of("ok"), tokens_of("stop")
    body = {"prompt": [context + continuation], "max_tokens": 1, "logprobs": 1, "echo": True, **GREEDY}
    answer = client.completions.create(**body).model_dump()
    ((logprob, is_greedy),) = LocalCompletionsAPI.parse_logprobs(answer, ctxlens=[len(context)])
    logits = native.model(torch.tensor([context + continuation])).logits[0]
    expected = torch.log_softmax(logits, dim=-1).detach()[range(len(context) - 1, len(context) + 3), continuation]
    assert logprob == pytest.approx(float(expected.sum()), abs=1e-3)
    assert is_greedy == (logits[len(context) - 1 : -1].argmax(-1).tolist() == continuation)


def test_models_are_listed_and_found(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").model_extra["max_model_len"] == 256
    with pytest.raises(NotFoundError, match="no model 'other' here, but tiny"):
        client.models.retrieve("other")
    with pytest.raises(NotFoundError, match=re.escape("no model '../../etc/passwd' here")):
        client.completions.create(model="../../etc/passwd", prompt="ok")


def test_texts_and_tokens_go_both_ways(served):
    with served.http() as http:
        for text in ("naïve 😀", ""):
            got = http.post("/tokenize", json={"prompt": text}).json()
            assert got == {"count": len(tokens_of(text)), "max_model_len": 256, "tokens": tokens_of(text)}
            assert http.post("/detokenize", json={"tokens": got["tokens"]}).json() == {"prompt": text}
        plain = [{"role": "user", "content": "ok"}]
        expected = TOKENIZER.apply_chat_template(plain, add_generation_prompt=True, return_dict=True).input_ids
        assert http.post("/tokenize", json={"messages": plain}).json()["tokens"] == expected
        for body in ({}, {"prompt": "ok", "messages": plain}):
            assert http.post("/tokenize", json=body).status_code == 400


WRONG = {
    "an option of others": ({"num_beams": 4}, "num_beams: This server does not search with beams"),
    "beams by another name": ({"best_of": 4}, "best_of is 4, but must equal n"),
    "a suffix": ({"suffix": "x"}, "suffix is not supported"),
    "a temperature": ({"temperature": 3}, "temperature: Input should be less than or equal to 2"),
    "no number": ({"temperature": float("nan")}, "temperature"),
    "too long": ({"max_tokens": 300}, "The prompt has 2 tokens and asks for 300 more; this model takes 256"),
    "a prompt too long": ({"prompt": [5] * 256}, "this model takes 256 together"),
    "no prompt": ({"prompt": ""}, "The prompt has no tokens"),
    "no prompts": ({"prompt": []}, "prompt"),
    "a foreign token": ({"prompt": [5, VOCAB]}, f"token id {VOCAB}"),
    "a token that is none": ({"prompt": [True]}, "prompt"),
    "a foreign bias": ({"logit_bias": {VOCAB: 1}}, f"logit_bias has token {VOCAB}"),
    "a bias of words": ({"logit_bias": {"ok": 1}}, "logit_bias"),
    "an empty stop string": ({"stop": ""}, "stop"),
    "half a character": ({"prompt": "\ud800"}, "hex escape"),
    "options of a stream that is none": ({"stream_options": {"include_usage": True}}, "set stream to true"),
    "too many": ({"n": 500}, "n: Input should be less than or equal to 128"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_is_told_in_openais_form(served, case):
    change, words = WRONG[case]
    body = json.dumps({"model": "tiny", "prompt": "ok", "max_tokens": 2, **change})
    with served.http() as http:
        answer = http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert words in error["message"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "Traceback" not in answer.text


CHATS = {
    "tools": ({"tools": [{"type": "function"}]}, "tools"),
    "an image": ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
    "no message": ({"messages": []}, "messages"),
    "alternatives of nothing": ({"top_logprobs": 3}, "set it to true"),
}


@pytest.mark.parametrize("case", CHATS)
def test_what_a_chat_cannot_be_is_told(client, case):
    change, words = CHATS[case]
    with pytest.raises(BadRequestError, match=words):
        client.chat.completions.create(**{"model": "tiny", "messages": CHAT, **change})


def test_a_model_without_a_template_says_so(native):
    plain = byte_level(VOCAB)
    plain.chat_template = None
    model = tiny()
    with live(orca_hf.engine(model), model, plain) as running, pytest.raises(BadRequestError, match="chat template"):
        running.openai().chat.completions.create(model="tiny", messages=CHAT)


def test_what_orca_does_not_run_comes_from_native_generate(native):
    model = tiny()
    model.generation_config.guidance_scale = 1.5  # runs the model twice, which Orca leaves to native
    prompt = tokens_of("ok")
    expected = native(prompt, max_new_tokens=8, guidance_scale=1.5)[0]
    with live(orca_hf.engine(model), model, TOKENIZER) as running:
        create = running.openai().completions.create
        for options in ({}, {"logprobs": 2}):
            got = create(prompt=prompt, max_tokens=8, **options, **GREEDY)
            streamed = list(create(prompt=prompt, max_tokens=8, stream=True, **options, **GREEDY))
            assert got.choices[0].text == text_of(prompt, expected)
            assert "".join(chunk.choices[0].text for chunk in streamed) == got.choices[0].text
            stopped = create(prompt=prompt, max_tokens=8, stop=got.choices[0].text[2], **options, **GREEDY)
            assert stopped.choices[0].text == got.choices[0].text[:2]
            if options:
                assert len(got.choices[0].logprobs.tokens) == len(expected)
                count = stopped.usage.completion_tokens
                assert stopped.choices[0].logprobs.tokens == got.choices[0].logprobs.tokens[:count]
        with running.http() as http:
            assert "orca_native_fallbacks_total 6.0" in http.get("/metrics").text
