"""Promise: what streams is what is answered at once, event by event, however it is cut, whoever leaves or fails."""

import json
import shutil
import socket
import subprocess

import pytest
from live import PATIENCE, FakeEngine, faked
from openai import APIError
from tokenizers_tiny import byte_level, sentencepiece

TOKENIZER = byte_level()


def tokens_of(text, tokenizer=TOKENIZER):
    return tokenizer(text, add_special_tokens=False).input_ids


@pytest.fixture(scope="module")
def emoji():
    with faked(FakeEngine(tokens_of("é😀 ok, 漢字 ends.")), TOKENIZER) as running:
        yield running


def saying(text):
    """A tokenizer whose every token is this text."""

    class Saying(type(TOKENIZER)):
        def decode(self, ids, **options):
            return text * len(ids)

    return Saying(tokenizer_object=TOKENIZER.backend_tokenizer, eos_token="<eos>")


def events(text):
    blocks = text.split("\n\n")
    assert blocks[-1] == ""
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks[:-1])
    assert blocks[-2] == "data: [DONE]"
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]


def test_curl_reads_whole_characters_event_by_event(emoji):
    body = json.dumps({"prompt": "k", "stream": True, "max_tokens": 90})
    command = ["curl", "-sN", f"{emoji.url}/v1/completions", "-H", "Content-Type: application/json", "-d", body]
    if shutil.which("curl"):
        data = subprocess.run(command, capture_output=True, check=True, timeout=PATIENCE).stdout
    else:
        with emoji.http() as client:
            data = client.post("/v1/completions", json=json.loads(body)).content
    pieces = [event["choices"][0]["text"] for event in events(data.decode())]
    assert "".join(pieces) == "é😀 ok, 漢字 ends."
    assert pieces[:2] == ["é", "😀"]
    assert all(len(piece) <= 3 for piece in pieces)


STOPS = [[], ["ends"], [" ok"], ["😀"], ["字 e", "nothing"], ["é"], ["zzz"], [".", "d"], ["ok, 漢字 ends.!"]]


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("limit", [1, 3, 8, 90])
def test_a_joined_stream_is_the_whole_answer(emoji, stop, limit):
    create = emoji.openai().completions.create
    given = {"model": "tiny", "prompt": ["k", "o"], "max_tokens": limit, "stop": stop, "n": 2}
    whole = create(**given)
    stream = list(create(**given, stream=True, stream_options={"include_usage": True}))
    joined = {choice.index: "" for choice in whole.choices}
    reasons = {}
    for chunk in stream[:-1]:
        (choice,) = chunk.choices
        joined[choice.index] += choice.text
        if choice.finish_reason:
            reasons[choice.index] = choice.finish_reason
    assert [joined[i] for i in range(4)] == [choice.text for choice in whole.choices]
    assert [reasons[i] for i in range(4)] == [choice.finish_reason for choice in whole.choices]
    assert stream[-1].usage == whole.usage
    assert stream[-1].choices == []
    text = "é😀 ok, 漢字 ends."
    cut = min([text.find(each) for each in stop if each in text], default=len(text))
    if limit == 90:
        assert {choice.text for choice in whole.choices} == {text[:cut]}
        assert {choice.finish_reason for choice in whole.choices} == {"stop" if cut < len(text) else "length"}
    for choice in whole.choices:
        assert text.startswith(choice.text.rstrip("\ufffd"))
        assert not any(each in choice.text for each in stop)


@pytest.mark.parametrize("continuous", [False, True])
def test_each_chunk_says_what_was_used_so_far_if_that_is_asked_for(emoji, continuous):
    options = {"include_usage": True, "continuous_usage_stats": continuous}
    body = {"prompt": ["k", "ok"], "n": 2, "max_tokens": 5, "stream": True, "stream_options": options}
    with emoji.http() as client:
        *chunks, last = [event["usage"] for event in events(client.post("/v1/completions", json=body).text)]
    num_prompt = len(tokens_of("k") + tokens_of("ok"))
    assert last == {"prompt_tokens": num_prompt, "completion_tokens": 20, "total_tokens": num_prompt + 20}
    if continuous:
        counts = [used["completion_tokens"] for used in chunks]
        assert counts == sorted(counts)
        assert (counts[-1], len(chunks) > 4, counts[0] < 6) == (20, True, True)
        assert all(used["total_tokens"] == num_prompt + count for used, count in zip(chunks, counts, strict=True))
    else:
        assert set(chunks) == {None}


def test_a_stop_string_ends_the_request_in_the_engine():
    engine = FakeEngine()
    with faked(engine, TOKENIZER) as running:
        stream = running.openai().completions.create(model="tiny", prompt="k", max_tokens=50, stop="st", stream=True)
        (handle,) = engine.wait_for(1)
        handle.say(*tokens_of("oks"), *tokens_of("t"))
        assert "".join(chunk.choices[0].text for chunk in stream) == "ok"
        assert handle.cancelled.wait(PATIENCE)


def test_what_may_begin_a_stop_string_waits_and_comes_when_it_is_none():
    engine = FakeEngine()
    with faked(engine, TOKENIZER) as running:
        stream = running.openai().completions.create(model="tiny", prompt="k", stop="sto", stream=True)
        (handle,) = engine.wait_for(1)
        handle.say(*tokens_of("s"), *tokens_of("t"), *tokens_of("k"))
        assert next(stream).choices[0].text == "stk"
        handle.end()


@pytest.mark.parametrize("fallback", [False, True])
def test_spaces_of_sentencepiece_stay_where_they_belong(fallback):
    tokenizer = sentencepiece(fallback=fallback)
    the, sea, dot = tokenizer.convert_tokens_to_ids(["▁the", "▁sea", "."])
    with faked(FakeEngine([the, sea, dot]), tokenizer) as running:
        create = running.openai().completions.create
        assert create(model="tiny", prompt=[sea]).choices[0].text == " the sea."
        assert create(model="tiny", prompt=[sea], echo=True).choices[0].text == "sea the sea."
        assert create(model="tiny", prompt=[1]).choices[0].text == "the sea."  # after <bos> a text begins


def test_line_ends_of_other_worlds_do_not_break_events():
    with faked(FakeEngine([5, 6]), saying("\x85\u2028\r\n")) as running, running.http() as client:
        text = client.post("/v1/completions", json={"prompt": "k", "stream": True}).text
        assert len(text.splitlines()) == 2 * len(text.split("\n\n")) - 2
        assert "".join(event["choices"][0]["text"] for event in events(text)) == "\x85\u2028\r\n" * 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels_its_request(stream):
    engine = FakeEngine()
    with faked(engine, TOKENIZER) as running:
        body = json.dumps({"prompt": "k", "stream": stream, "n": 2}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        with socket.create_connection(running.address, PATIENCE) as connection:
            connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
            handles = engine.wait_for(2)
            if stream:
                handles[0].say(*tokens_of("k"))
                assert connection.recv(9) == b"HTTP/1.1 "
        assert all(handle.cancelled.wait(PATIENCE) for handle in handles)


def test_an_engine_that_fails_mid_stream_is_told_without_its_words():
    engine = FakeEngine()
    with faked(engine, TOKENIZER) as running:
        stream = running.openai().chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "k"}], stream=True, n=2
        )
        first, second = engine.wait_for(2)
        first.say(*tokens_of("k"))
        assert next(stream).choices[0].delta.content == "k"
        first.fail(RuntimeError("a secret path"))
        with pytest.raises(APIError) as caught:
            list(stream)
        assert "secret" not in str(caught.value)
        assert caught.value.code == "internal_error"
        assert second.cancelled.wait(PATIENCE)


# More than sockets hold.
FLOOD = {"tokenizer": saying("x" * 4096), "tokens": [5] * 3000}


def test_a_client_that_does_not_read_holds_nobody_up():
    engine = FakeEngine()
    with faked(engine, FLOOD["tokenizer"]) as running, running.http() as lazy, running.http() as client:
        request = lazy.build_request("POST", "/v1/completions", json={"prompt": "k", "stream": True, "max_tokens": 100})
        response = lazy.send(request, stream=True)
        (handle,) = engine.wait_for(1)
        handle.say(*FLOOD["tokens"])
        answer = client.post("/tokenize", json={"prompt": "ok"})
        assert answer.json()["tokens"] == tokens_of("ok")
        response.close()
        assert handle.cancelled.wait(PATIENCE)


def test_a_client_that_never_reads_loses_its_stream():
    engine = FakeEngine()
    with faked(engine, FLOOD["tokenizer"], stall_timeout=0.1) as running, socket.socket() as lazy:
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lazy.connect(running.address)
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        lazy.sendall(head + b'Content-Length: 29\r\n\r\n{"prompt":"k", "stream":true}')
        (handle,) = engine.wait_for(1)
        handle.say(*FLOOD["tokens"])
        assert handle.cancelled.wait(PATIENCE)
