"""Promise: no request that its own description allows, and none that it forbids, makes the server fail."""

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from live import live
from schemathesis.checks import not_a_server_error
from tiny import make_model
from tokenizers_tiny import byte_level

import orca_hf

TOKENIZER = byte_level()


@pytest.fixture(scope="module")
def description():
    model = make_model("llama")
    model.generation_config.eos_token_id = TOKENIZER.eos_token_id
    with live(orca_hf.engine(model), model, TOKENIZER, default_max_tokens=8, max_open=8) as running:
        yield schemathesis.openapi.from_url(f"{running.url}/openapi.json")


fuzzed = schemathesis.pytest.from_fixture("description")


@fuzzed.parametrize()
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_request_makes_the_server_fail(case):
    answer = case.call(timeout=30)
    case.validate_response(answer, checks=(not_a_server_error,))
    assert answer.status_code < 500
    if answer.status_code >= 400:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
