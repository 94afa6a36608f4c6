"""Promise: who may not ask is not answered, what is too much is refused, and nothing that is sent breaks the server."""

import asyncio
import socket

import httpx
import pytest
from live import PATIENCE, FakeEngine, faked
from openai import AuthenticationError, RateLimitError
from tokenizers_tiny import byte_level

from orca_hf.errors import ConfigError
from orca_hf.server.command import bind, check_exposure
from orca_hf.server.stream import EventStream

TOKENIZER = byte_level()
BODY = {"prompt": "k", "max_tokens": 4}


@pytest.fixture(scope="module")
def served():
    with faked(FakeEngine([5]), TOKENIZER, max_body_bytes=2000) as running:
        yield running


@pytest.fixture(scope="module")
def locked():
    with faked(FakeEngine([5]), TOKENIZER, api_keys=("first", "ключ")) as running:
        yield running


PATHS = ["/v1/models", "/v1/completions", "/tokenize", "/metrics", "/status.json", "/openapi.json", "//", "/nothing"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("sent", [None, "Bearer wrong", "Bearer", "first", "Basic first", "Bearer firs", "Bearer \xff"])
def test_without_the_key_there_is_no_answer(locked, path, sent):
    headers = {} if sent is None else {"Authorization": sent.encode("latin-1")}
    answer = httpx.post(f"{locked.url}{path}", headers=headers, json=BODY)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.json()["error"]["code"] == "invalid_api_key"


def test_every_key_opens(locked):
    for key in ("first", "ключ"):
        headers = {"Authorization": f"Bearer {key}".encode()}
        assert httpx.post(f"{locked.url}/v1/completions", headers=headers, json=BODY).status_code == 200
    with pytest.raises(AuthenticationError):
        locked.openai(api_key="second").models.list()


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_who_watches_needs_no_key(locked, path):
    assert httpx.get(f"{locked.url}{path}").status_code == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LocalHost:80", 200),
        ("[::1]:80", 200),
        ("evil.example", 421),
        ("localhost.evil", 421),
        ("", 421),
    ],
)
def test_a_web_page_that_takes_our_address_is_not_answered(served, host, status):
    assert httpx.get(f"{served.url}/v1/models", headers={"Host": host}).status_code == status


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.com", ""])
def test_strangers_are_let_in_with_a_key_or_on_demand_only(host):
    with pytest.raises(ConfigError, match="--api-key"):
        check_exposure(host, (), insecure=False)
    assert check_exposure(host, ("key",), insecure=False) is None
    assert check_exposure(host, (), insecure=True) is None


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.8.8.8"])
def test_this_machine_is_served_without_a_key(host):
    assert host in check_exposure(host, (), insecure=False)


def test_a_taken_port_is_told_at_once():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port {port} cannot be bound"):
            bind("127.0.0.1", port)


MALFORMED = [
    b"",
    b"{",
    b"[]",
    b"null",
    b'"k"',
    b"\xff\xfe",
    b'{"prompt": NaN}',
    b"[" * 900,
    b'{"prompt": 1' + b"0" * 900,
]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize("body", MALFORMED)
def test_a_malformed_body_is_the_senders_fault(served, path, body):
    answer = httpx.post(f"{served.url}{path}", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_a_form_of_a_web_page_is_no_request(served):
    headers = {"Content-Type": "text/plain"}
    answer = httpx.post(f"{served.url}/v1/completions", content=b'{"prompt":"k"}', headers=headers)
    assert answer.status_code == 400


def chunks(size):
    for _ in range(size // 100):
        yield b" " * 100


@pytest.mark.parametrize("content", [b" " * 2001, chunks(3000)], ids=["announced", "in chunks"])
def test_a_body_that_is_too_large_is_refused(served, content):
    answer = httpx.post(f"{served.url}/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "body_too_large"


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nothing", 404), ("GET", "/v1/completions", 405)])
def test_what_is_not_there_is_told_in_the_same_form(served, method, path, status):
    answer = httpx.request(method, f"{served.url}{path}")
    assert answer.status_code == status
    assert set(answer.json()) == {"error"}


def test_a_full_queue_says_when_to_come_back():
    engine = FakeEngine()
    with faked(engine, TOKENIZER, max_open=3) as running:
        client = running.openai()
        stream = client.completions.create(model="tiny", prompt="k", n=2, stream=True)
        handles = engine.wait_for(2)
        with pytest.raises(RateLimitError) as refused:
            client.completions.create(model="tiny", prompt="k", n=2)
        assert refused.value.response.headers["retry-after"] == "1"
        assert refused.value.code == "queue_full"
        for handle in handles:
            handle.end()
        list(stream)
        engine.script = [5]
        assert len(client.completions.create(model="tiny", prompt="k", n=3).choices) == 3
        answer = httpx.post(f"{running.url}/v1/completions", json={"prompt": "k", "n": 4})
        assert (answer.status_code, "gives 3 at once" in answer.text) == (400, True)  # coming back does not help


def test_whoever_reads_that_a_stream_is_over_may_use_its_place():
    happened = []

    async def chunks():
        yield {}

    async def send(message):
        happened.append(message.get("body"))

    stream = EventStream(chunks(), PATIENCE, lambda: happened.append("closed"))
    asyncio.run(stream({}, asyncio.Event().wait, send))
    assert b"[DONE]" in happened[happened.index("closed") + 1]


def test_one_client_cannot_take_all_places():
    engine = FakeEngine()
    with faked(engine, TOKENIZER, api_keys=("a", "b"), key="a", max_per_client=1) as running:
        stream = running.openai().completions.create(model="tiny", prompt="k", stream=True)
        (first,) = engine.wait_for(1)
        with pytest.raises(RateLimitError, match="1 requests open"):
            running.openai().completions.create(model="tiny", prompt="k")
        other = running.openai(api_key="b").completions.create(model="tiny", prompt="k", stream=True)
        _, second = engine.wait_for(2)
        first.end()
        second.end()
        assert len(list(stream)) == len(list(other)) == 1
        engine.script = [5]
        running.openai().completions.create(model="tiny", prompt="k")


def test_a_refused_request_gives_its_place_back():
    engine = FakeEngine([5])
    with faked(engine, TOKENIZER, max_open=1) as running, running.http() as http:
        for _ in range(3):
            assert http.post("/v1/completions", json={"prompt": "k", "max_tokens": 900}).status_code == 400
        assert http.post("/v1/completions", json=BODY).status_code == 200
        assert running.service.limits.num_open == 0


def test_an_error_of_the_server_is_told_without_a_word_of_it():
    engine = FakeEngine()
    engine.submit = lambda prompt, **given: (_ for _ in ()).throw(RuntimeError("a secret path"))
    with faked(engine, TOKENIZER) as running, running.http() as http:
        for stream in (False, True):
            answer = http.post("/v1/completions", json={"prompt": "k", "stream": stream})
            assert answer.status_code == 500
            assert answer.json()["error"]["code"] == "internal_error"
            assert "secret" not in answer.text
        assert running.service.limits.num_open == 0


def test_an_engine_that_has_died_is_seen_from_outside():
    engine = FakeEngine()
    engine.healthy = False
    with faked(engine, TOKENIZER) as running, running.http() as http:
        assert http.get("/health").status_code == http.get("/ready").status_code == 503


def test_an_abandoned_connection_does_not_keep_its_place():
    engine = FakeEngine()
    with faked(engine, TOKENIZER, max_open=1) as running:
        host, port = running.address
        with socket.create_connection((host, port), PATIENCE) as connection:
            head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            connection.sendall(head + b"Content-Length: 900\r\n\r\n{")  # and the rest never comes
        engine.script = [5]
        assert httpx.post(f"{running.url}/v1/completions", json=BODY).status_code == 200
