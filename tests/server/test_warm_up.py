"""Promise: a server that says it is ready has run what requests run, and answers, looks and waits while it does."""

import threading

import httpx
import pytest
from live import PATIENCE, FakeEngine, live, wait_until_ready
from tiny import make_model
from tokenizers_tiny import byte_level

import orca_hf

TOKENIZER = byte_level()


def served(engine, write, tokenizer=TOKENIZER):
    return live(engine, make_model(), tokenizer, warm_up=write)


def test_it_is_ready_when_its_own_requests_are_answered_and_not_before():
    engine, lines = FakeEngine(), []
    with served(engine, lines.append) as running, running.http() as http:
        (own,) = engine.wait_for(1)
        refused = http.get("/ready")
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert "is warming up" in refused.json()["error"]["message"]
        assert http.get("/health").status_code == 200
        assert lines == ["Warming up ..."]
        engine.script = [5]  # for those that follow
        own.say(5)
        own.end()
        assert wait_until_ready(running).status_code == 200
    assert len(lines) == 2
    assert lines[1].startswith("Ready: warmed up in ")
    assert lines[1].endswith(" s")


def test_a_request_that_comes_before_is_answered_too():
    engine = FakeEngine()
    with served(engine, lambda line: None) as running:
        (own,) = engine.wait_for(1)
        answers = []
        ask = threading.Thread(
            target=lambda: answers.append(httpx.post(f"{running.url}/v1/completions", json={"prompt": "k"}))
        )
        ask.start()
        _, theirs = engine.wait_for(2)
        theirs.say(5)
        theirs.end()
        ask.join(PATIENCE)
        assert answers[0].status_code == 200
        assert httpx.get(f"{running.url}/ready").status_code == 503
        engine.script = [5]
        own.end()
        assert wait_until_ready(running).status_code == 200


@pytest.mark.parametrize("has_template", [True, False])
def test_it_goes_every_way_that_requests_go(has_template):
    tokenizer = byte_level()
    if not has_template:
        tokenizer.chat_template = None
    engine = FakeEngine([5])
    with served(engine, lambda line: None, tokenizer) as running:
        assert wait_until_ready(running).status_code == 200
    given = [handle.given for handle in engine.handles]
    assert {each.get("do_sample") for each in given} == {False, True}
    assert any(each["logits_processor"] for each in given)
    assert any(each["logprobs"] is not None for each in given)
    greeting = tokenizer("Hello").input_ids
    assert all((each["prompt"] == greeting) != has_template for each in given)


def test_the_first_request_after_it_has_nothing_left_to_make():
    model = make_model("llama")
    engine = orca_hf.engine(model)
    with live(engine, model, TOKENIZER, warm_up=lambda line: None) as running:
        assert wait_until_ready(running).status_code == 200
        packed = orca_hf.explain(model).engines[0].packed_bytes
        assert packed  # and with that the kernels, which are compiled when weights are first packed
        running.openai().completions.create(model="tiny", prompt="k", max_tokens=32)
        assert orca_hf.explain(model).engines[0].packed_bytes == packed


def test_a_template_that_wants_other_messages_is_no_failure(caplog):
    tokenizer = byte_level()
    tokenizer.chat_template = "{{ raise_exception('begin with a system message') }}"
    with served(FakeEngine([5]), lambda line: None, tokenizer) as running:
        assert wait_until_ready(running).status_code == 200
    assert "begin with a system message" in caplog.text


def test_a_server_whose_own_requests_fail_is_not_ready(caplog):
    engine = FakeEngine()
    lines = []
    with served(engine, lines.append) as running:
        (own,) = engine.wait_for(1)
        own.fail(RuntimeError("no compiler"))
        limit = threading.Event()
        while "could not warm up" not in (answer := httpx.get(f"{running.url}/ready")).text and not limit.wait(0.01):
            assert answer.status_code == 503
        assert httpx.get(f"{running.url}/health").status_code == 200
    assert "no compiler" in caplog.text
    assert lines == ["Warming up ..."]


def test_a_server_that_is_told_to_stop_meanwhile_stops():
    engine = FakeEngine()
    with served(engine, lambda line: None) as running:
        (own,) = engine.wait_for(1)
        running.stop()
        running.join()
        assert own.cancelled.wait(PATIENCE)
