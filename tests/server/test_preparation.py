"""Promise: what one client has prepared holds no other up, is made once, and ends with its client."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from live import PATIENCE, FakeEngine, live
from tiny import make_model
from tokenizers_tiny import byte_level

TOKENIZER = byte_level()
SMALL = {"prompt": "k", "max_tokens": 1}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["ok", "stop"]}}}
LONG = "k" * 40_000  # makes a body that is not prepared with the small ones


class Gate:
    """Stands in for a method: notes each call, and lets it through when it is open, or what it is for is short."""

    def __init__(self, monkeypatch, owner, name, shortest=0):
        self.shortest = shortest
        self.calls = []
        self.entered = threading.Semaphore(0)
        self.open = threading.Event()
        self._method = getattr(owner, name)
        monkeypatch.setattr(owner, name, self)

    def __call__(self, *args, **kwargs):
        self.calls.append(args)
        if not self.shortest or len(args[0]) >= self.shortest:
            self.entered.release()
            assert self.open.wait(PATIENCE)
        return self._method(*args, **kwargs)

    def wait(self):
        assert self.entered.acquire(timeout=PATIENCE)


@pytest.fixture
def served():
    model = make_model()
    model.generation_config.eos_token_id = TOKENIZER.eos_token_id
    with live(FakeEngine([5]), model, TOKENIZER, api_keys=("a", "b"), max_model_len=64_000) as running:
        yield running


@pytest.fixture
def ask(served):
    """Sends a request with a key, on a thread of its own."""
    with ThreadPoolExecutor(32) as threads, httpx.Client(base_url=served.url, timeout=PATIENCE) as http:

        def send(body, key="a", path="/v1/completions"):
            return threads.submit(http.post, path, json=body, headers={"Authorization": f"Bearer {key}"})

        yield send


def left(served):
    """Waits until no request is open."""
    limit = time.monotonic() + PATIENCE
    while served.service.limits.num_open:
        assert time.monotonic() < limit


@pytest.mark.parametrize("key", ["a", "b"])
@pytest.mark.parametrize(
    ("owner", "name", "body", "path"),
    [
        ("_grammars", "compiled", {**SMALL, "response_format": SCHEMA}, "/v1/completions"),
        ("_grammars", "compiled", {**SMALL, "prompt": LONG, "response_format": SCHEMA}, "/v1/completions"),
        ("prompts", "of_text", {**SMALL, "prompt": LONG}, "/v1/completions"),
        ("prompts", "of_text", {"prompt": LONG}, "/tokenize"),
        ("decoder", "decode", {"tokens": [5] * 20_000}, "/detokenize"),
        ("decoder", "decode", {"prompt": [5] * 20_000, "echo": True}, "/v1/completions"),
        ("decoder", "text_and_begins", {"prompt": [5] * 20_000, "echo": True, "logprobs": 0}, "/v1/completions"),
        ("engine", "prompt_logprobs", {"prompt": [5], "echo": True, "logprobs": 0}, "/v1/completions"),
    ],
    ids=["schema", "long schema", "long text", "tokenize", "detokenize", "echo", "places", "log-probabilities"],
)
def test_a_small_request_waits_for_nothing_slow(served, ask, monkeypatch, owner, name, body, path, key):
    served.service.engine.prompt_logprobs = lambda prompt, num_top: [None] * len(prompt)
    shortest = 0 if name in ("compiled", "prompt_logprobs") else 1000
    gate = Gate(monkeypatch, getattr(served.service, owner), name, shortest)
    slow = [ask(body, path=path) for _ in range(4)]
    gate.wait()
    assert ask(SMALL, key).result(PATIENCE).status_code == 200
    assert not any(each.done() for each in slow)
    gate.open.set()
    assert [each.result(PATIENCE).status_code for each in slow] == [200] * 4


def test_a_request_of_many_prompts_lets_others_come_between(served, ask, monkeypatch):
    gate = Gate(monkeypatch, served.service.prompts, "of_completion")
    many = ask({"prompt": [f"k{i}" for i in range(50)], "max_tokens": 1})
    gate.wait()
    one = ask({"prompt": "one", "max_tokens": 1}, "b")
    limit = time.monotonic() + PATIENCE
    while not served.service._lanes["prepare"]._queues:  # it waits for its turn
        assert time.monotonic() < limit
    gate.open.set()
    assert one.result(PATIENCE).status_code == many.result(PATIENCE).status_code == 200
    assert [prompt for prompt, _ in gate.calls].index("one") == 1


@pytest.mark.parametrize("n", [1, 64])
@pytest.mark.parametrize("prompts", [1, 3])
def test_a_schema_is_compiled_once(served, ask, monkeypatch, n, prompts):
    from llguidance import LLMatcher

    gate = Gate(monkeypatch, LLMatcher, "grammar_from_json_schema")
    gate.open.set()
    body = {"prompt": ["k"] * prompts, "max_tokens": 1, "n": n, "response_format": SCHEMA}
    for _ in range(3):
        answer = ask(body).result(PATIENCE)
        assert len(answer.json()["choices"]) == n * prompts
    assert len(gate.calls) == 1
    # Each answer's processor is its own.
    processors = [handle.given["logits_processor"][-1] for handle in served.service.engine.handles]
    assert len({id(each._matcher) for each in processors}) == 3 * n * prompts


def test_no_more_grammars_are_remembered_than_that(served, ask):
    for i in range(70):
        wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": [f"v{i}", "x" * 20_000]}}}
        assert ask({**SMALL, "response_format": wanted}).result(PATIENCE).status_code == 200
    remembered = served.service._grammars._remembered
    assert 0 < len(remembered) <= 64
    assert sum(map(len, remembered)) <= 2**20


@pytest.mark.parametrize(
    ("owner", "name", "body"),
    [
        ("prompts", "of_completion", {"prompt": ["k"] * 50, "max_tokens": 1}),
        ("_grammars", "compiled", {"prompt": ["k"] * 50, "max_tokens": 1, "response_format": SCHEMA}),
        ("engine", "submit", {"prompt": ["k"] * 50, "max_tokens": 1}),
    ],
)
def test_what_its_client_has_left_is_prepared_no_further(served, ask, monkeypatch, owner, name, body):
    gate = Gate(monkeypatch, getattr(served.service, owner), name)
    headers = {"Authorization": "Bearer a"}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{served.url}/v1/completions", json=body, headers=headers, timeout=httpx.Timeout(PATIENCE, read=0.2)
        )
    left(served)
    gate.open.set()
    assert (
        httpx.post(f"{served.url}/v1/completions", json=SMALL, headers={"Authorization": "Bearer b"}).status_code == 200
    )
    assert len(gate.calls) <= 2  # the one that ran, and that of the other client


@pytest.mark.parametrize(
    ("path", "body"), [("/tokenize", {"prompt": "k"}), ("/detokenize", {"tokens": [5]})], ids=["tokenize", "detokenize"]
)
def test_tokenizing_takes_a_place_like_any_request(monkeypatch, path, body):
    with (
        live(FakeEngine([5]), make_model(), TOKENIZER, max_per_client=1) as running,
        running.http() as http,
        ThreadPoolExecutor() as threads,
    ):
        owner, name = ("prompts", "of_text") if path == "/tokenize" else ("decoder", "decode")
        gate = Gate(monkeypatch, getattr(running.service, owner), name)
        first = threads.submit(http.post, path, json=body)
        gate.wait()
        refused = http.post(path, json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        gate.open.set()
        assert first.result(PATIENCE).status_code == 200
        assert http.post(path, json=body).status_code == 200
        running.service.limits.closing = True
        assert http.post(path, json=body).status_code == 503


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/tokenize", {"prompt": "k" * 60}, 200),
        ("/tokenize", {"prompt": "k" * 400_000}, 400),
        ("/tokenize", {"messages": [{"role": "user", "content": "k" * 400_000}]}, 400),
        ("/detokenize", {"tokens": [5] * 60}, 200),
        ("/detokenize", {"tokens": [5] * 400_000}, 400),
        ("/v1/completions", {"prompt": "k" * 400_000}, 400),
        ("/v1/completions", {"prompt": [[5], [5] * 400_000]}, 400),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "k" * 400_000}]}, 400),
    ],
)
def test_no_text_is_encoded_that_cannot_fit(path, body, status):
    lengths = []

    class Tokenizer(type(TOKENIZER)):
        def __call__(self, text, **options):
            lengths.append(len(text))
            return super().__call__(text, **options)

    tokenizer = byte_level()
    tokenizer.__class__ = Tokenizer
    with live(FakeEngine([5]), make_model(), tokenizer, max_model_len=64) as running, running.http() as http:
        answer = http.post(path, json=body)
        assert answer.status_code == status
        assert status == 200 or "at most 128 tokens" in answer.text or "more than 128 tokens" in answer.text
        assert max(lengths, default=0) <= 2**14
