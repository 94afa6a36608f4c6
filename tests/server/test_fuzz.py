"""Promise: no request that the server's own description allows, and none that it forbids, makes it fail."""

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from live import PATIENCE, live
from schemathesis import GenerationMode
from tiny import make_model
from tokenizers_tiny import byte_level

import orca_hf

TOKENIZER = byte_level()
GETS = ["/v1/models", "/v1/models/{name}", "/health", "/ready", "/metrics", "/status.json"]
POSTS = ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]
CASES = [(path, GenerationMode.POSITIVE) for path in GETS + POSTS] + [(path, GenerationMode.NEGATIVE) for path in POSTS]
FUZZED = settings(
    max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate], derandomize=True
)


@pytest.fixture(scope="module")
def description():
    model = make_model("llama")
    model.generation_config.eos_token_id = TOKENIZER.eos_token_id
    with live(orca_hf.engine(model), model, TOKENIZER, default_max_tokens=8, max_open=8) as running:
        yield schemathesis.openapi.from_url(f"{running.url}/openapi.json")


def test_the_description_has_every_route(description):
    assert {result.ok().path for result in description.get_all_operations()} == {*GETS, *POSTS}


@pytest.mark.parametrize(("path", "mode"), CASES)
def test_no_request_makes_the_server_fail(description, path, mode):
    (operation,) = (each for each in (result.ok() for result in description.get_all_operations()) if each.path == path)
    statuses = set()

    @FUZZED
    @given(operation.as_strategy(generation_mode=mode))
    def fuzz(case):
        if isinstance(case.body, dict):
            for name in ("model", "suffix", "best_of", "stream_options", "logit_bias"):  # which end most requests early
                case.body.pop(name, None)
        answer = case.call(timeout=PATIENCE)
        statuses.add(answer.status_code)
        assert answer.status_code < 500, answer.text
        if answer.status_code >= 400:
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

    fuzz()
    expected = 400 if mode is GenerationMode.NEGATIVE else 404 if path == "/v1/models/{name}" else 200
    assert expected in statuses
