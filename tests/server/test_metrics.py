"""Promise: what the server says of itself is what it did."""

import pytest
from live import live
from prometheus_client.parser import text_string_to_metric_families
from tiny import make_model
from tokenizers_tiny import byte_level

import orca_hf

TOKENIZER = byte_level()


@pytest.fixture(scope="module")
def served():
    model = make_model("llama")
    with live(orca_hf.engine(model), model, TOKENIZER) as running:
        yield running


def values(http):
    families = text_string_to_metric_families(http.get("/metrics").text)
    return {(sample.name, *sample.labels.values()): sample.value for family in families for sample in family.samples}


def test_prometheus_reads_counts_and_times(served):
    with served.http() as http:
        before = values(http)
        http.post("/v1/completions", json={"prompt": [5, 6, 7], "max_tokens": 9, "n": 2}).raise_for_status()
        http.post("/v1/completions", json={"prompt": [5, 6, 7], "max_tokens": -1})
        http.get("/no/such/path")
        after = values(http)
    grown = {key: after[key] - before.get(key, 0) for key in after}
    assert grown["orca_generated_tokens_total",] == 18
    assert grown["orca_prompt_tokens_total",] == 6
    assert grown["orca_requests_finished_total",] == 2
    assert grown["orca_native_fallbacks_total",] == 0
    assert grown["orca_iterations_total",] == grown["orca_iteration_seconds_count",] >= 9
    for name in ("time_to_first_token", "time_per_output_token", "request"):
        assert grown[f"orca_{name}_seconds_count",] == 2
        assert grown[f"orca_{name}_seconds_sum",] > 0
    assert grown["orca_http_responses_total", "/v1/completions", "200"] == 1
    assert grown["orca_http_responses_total", "/v1/completions", "400"] == 1
    assert grown["orca_http_responses_total", "other", "404"] == 1
    assert after["orca_requests_running",] == after["orca_requests_waiting",] == after["orca_slots_reserved",] == 0
    assert after["orca_slots",] > 0


def test_the_status_shows_the_last_iterations(served):
    with served.http() as http:
        http.post("/v1/completions", json={"prompt": [5, 6, 7], "max_tokens": 4}).raise_for_status()
        status = http.get("/status.json").json()
    assert (status["model"], status["version"], status["open"]) == ("tiny", orca_hf.__version__, 0)
    assert status["is_healthy"] is True
    assert status["num_running"] == status["num_reserved"] == 0
    (*_, prefill, second, third, fourth) = status["recent"]
    assert prefill["shares"] == [[second["shares"][0][0], "prefill", 3]]
    assert [each["shares"][0][1:] for each in (second, third, fourth)] == [["decode", 1]] * 3
    assert second["started"] < third["started"]
    assert third["duration"] > 0
