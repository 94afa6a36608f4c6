"""Promise: what every client sends is taken, what would change the answer is refused, and both in plain words."""

import json
import logging

import httpx
import pytest
from live import FakeEngine, faked
from openai.types.chat import ChatCompletion
from tokenizers_tiny import byte_level

TOKENIZER = byte_level()
USER = {"role": "user", "content": "ok"}
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
BODIES = {CHAT: {"messages": [USER], "max_tokens": 1}, COMPLETION: {"prompt": "ok", "max_tokens": 1}}


@pytest.fixture(scope="module")
def served():
    with faked(FakeEngine([5]), TOKENIZER, max_model_len=200) as running:
        yield running


@pytest.fixture(scope="module")
def strict():
    with faked(FakeEngine([5]), TOKENIZER, strict=True) as running:
        yield running


def post(running, path, **changes):
    return httpx.post(f"{running.url}{path}", json={**BODIES.get(path, {}), **changes})


def tokens_of(running, messages):
    answer = httpx.post(f"{running.url}/tokenize", json={"messages": messages})
    assert answer.status_code == 200, answer.text
    return answer.json()["tokens"]


def described(running, path):
    """Names of the fields that the server says it takes at `path`."""
    everything = httpx.get(f"{running.url}/openapi.json").json()
    reference = everything["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    return everything["components"]["schemas"][reference.rpartition("/")[2]]["properties"]


@pytest.mark.parametrize("path", BODIES)
def test_null_is_left_out_in_every_field(strict, path):
    optional = dict.fromkeys(set(described(strict, path)) - set(BODIES[path]))
    answer = post(strict, path, **optional, anything=None)
    assert answer.status_code == 200, answer.text


NULLS = {
    "stream_options": {"include_usage": None, "continuous_usage_stats": None, "other": None},
    "response_format": {"type": "text", "json_schema": None},
    "logit_bias": {"5": None},
}


@pytest.mark.parametrize("field", NULLS)
def test_null_is_left_out_within_fields(served, field):
    answer = post(served, COMPLETION, stream=True, **{field: NULLS[field]})
    assert answer.status_code == 200, answer.text


def test_an_answer_is_a_message_of_the_next_request(served):
    answer = ChatCompletion.model_validate(post(served, CHAT).json())
    dumped = answer.choices[0].message.model_dump()
    assert {"annotations", "audio", "function_call", "tool_calls", "refusal"} <= set(dumped)
    said = {"role": "assistant", "content": dumped["content"]}
    assert tokens_of(served, [USER, dumped, USER]) == tokens_of(served, [USER, said, USER])


PLAIN = {"role": "assistant", "content": "ok ends"}
SAME = {
    "empty lists": {**PLAIN, "tool_calls": [], "annotations": [], "function_call": None},
    "a citation": {**PLAIN, "annotations": [{"type": "url_citation", "url_citation": {"url": "u"}}]},
    "parts": {**PLAIN, "content": [{"type": "text", "text": "ok "}, {"type": "text", "text": "ends"}]},
    "parts of another API": {**PLAIN, "content": [{"type": "output_text", "text": "ok ends", "annotations": []}]},
    "a cached part": {**PLAIN, "content": [{"type": "text", "text": "ok ends", "cache_control": {"type": "e"}}]},
    "a refusal": {"role": "assistant", "content": None, "refusal": "ok ends"},
    "a refusal's part": {"role": "assistant", "content": [{"type": "refusal", "refusal": "ok ends"}]},
    "an unknown field": {**PLAIN, "mood": "good"},
    "reasoning that the template does not write": {**PLAIN, "reasoning_content": "hm", "reasoning": None},
}


@pytest.mark.parametrize("case", SAME)
def test_a_message_is_taken_with_all_that_it_has(served, case):
    assert tokens_of(served, [USER, SAME[case], USER]) == tokens_of(served, [USER, PLAIN, USER])


HARMLESS = [
    {"tool_choice": "auto"},
    {"tool_choice": "none", "tools": []},
    {"tools": [], "functions": [], "parallel_tool_calls": True},
    {"modalities": ["text"]},
    {"audio": {}},
    {"prediction": {"type": "content", "content": "ok"}},
    {"verbosity": "medium", "reasoning_effort": "none"},
    {"min_tokens": 0, "stop_token_ids": [], "bad_words": [], "use_beam_search": False, "length_penalty": 1.0},
    {"skip_special_tokens": True, "spaces_between_special_tokens": False, "include_stop_str_in_output": False},
    {"add_generation_prompt": True, "chat_template_kwargs": {}, "documents": []},
    {"echo": False, "priority": 3, "request_id": "r", "cache_salt": "c", "best_of": 1},
    {"store": True, "metadata": {"a": None}, "service_tier": "auto", "user": "u", "prompt_cache_key": "k"},
]


@pytest.mark.parametrize("fields", HARMLESS, ids=str)
def test_what_changes_nothing_is_taken_even_strictly(strict, fields):
    answer = post(strict, CHAT, **fields)
    assert answer.status_code == 200, answer.text


TOOL = {"type": "function", "function": {"name": "f"}}
CHANGES_THE_ANSWER = [
    (CHAT, "tools", [TOOL]),
    (CHAT, "tool_choice", "required"),
    (CHAT, "tool_choice", TOOL),
    (CHAT, "functions", [{"name": "f"}]),
    (CHAT, "function_call", {"name": "f"}),
    (CHAT, "modalities", ["text", "audio"]),
    (CHAT, "audio", {"voice": "v", "format": "wav"}),
    (CHAT, "web_search_options", {}),
    (CHAT, "reasoning_effort", "high"),
    (CHAT, "verbosity", "low"),
    (CHAT, "chat_template", "{{ messages }}"),
    (CHAT, "chat_template_kwargs", {"enable_thinking": False}),
    (CHAT, "continue_final_message", True),
    (CHAT, "add_generation_prompt", False),
    (CHAT, "echo", True),
    (COMPLETION, "min_tokens", 3),
    (COMPLETION, "max_completion_tokens", 3),
    (COMPLETION, "prompt_logprobs", 0),
    (COMPLETION, "use_beam_search", True),
    (COMPLETION, "stop_token_ids", [5]),
    (COMPLETION, "bad_words", ["ok"]),
    (COMPLETION, "allowed_token_ids", [5]),
    (COMPLETION, "truncate_prompt_tokens", 3),
    (COMPLETION, "guided_json", {"type": "object"}),
    (COMPLETION, "guided_choice", ["a"]),
    (COMPLETION, "structured_outputs", {"regex": "a"}),
    (COMPLETION, "skip_special_tokens", False),
    (COMPLETION, "add_special_tokens", False),
]


@pytest.mark.parametrize(("path", "field", "value"), CHANGES_THE_ANSWER)
def test_what_would_change_the_answer_is_refused_by_name(served, path, field, value):
    answer = post(served, path, **{field: value})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, field, "unsupported_parameter")
    assert error["message"].startswith(f"{field}: ")


@pytest.mark.parametrize("field", ["tool_calls", "function_call", "audio"])
def test_so_it_is_within_a_message(served, field):
    answer = post(served, CHAT, messages=[USER, {**PLAIN, field: [TOOL]}])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, f"messages[1].{field}")


UNKNOWN = {
    "a field": (lambda name: {name: 1}, ""),
    "of a message": (lambda name: {"messages": [USER, {**USER, name: 1}]}, "messages[1]."),
    "of a part": (
        lambda name: {"messages": [{**USER, "content": [{"type": "text", "text": "k", name: 1}]}]},
        "messages[0].content[0].",
    ),
    "of an option": (lambda name: {"stream": True, "stream_options": {name: 1}}, "stream_options."),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_unknown_fields_are_taken_and_logged_once(served, strict, caplog, case):
    make, place = UNKNOWN[case]
    name = f"new {case}"
    for _ in range(3):
        assert post(served, CHAT, **make(name)).status_code == 200
    assert [repr(name) in record.getMessage() for record in caplog.records].count(True) == 1
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
    refused = post(strict, CHAT, **make(name)).json()["error"]
    assert refused["message"] == f"Unrecognized request argument supplied: {place}{name}"
    assert (refused["param"], refused["code"]) == (place + name, "unknown_parameter")


def test_made_up_names_neither_fill_the_log_nor_write_lines_of_their_own(caplog):
    with faked(FakeEngine([5]), TOKENIZER) as running:
        for i in range(3):
            names = {f"{i}\n{k}{'x' * 500}": 1 for k in range(50)}
            assert post(running, COMPLETION, **names).status_code == 200
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 64
    assert all("\n" not in line and len(line) < 300 for line in lines)
    assert "not logged" in lines[-1]


SAID = {
    # What is sent, where it is wrong, words of what is allowed, and of what was given.
    "too many stops": (COMPLETION, {"stop": ["a"] * 65}, "stop", "at most 64", "65"),
    "a number to stop at": (COMPLETION, {"stop": 5}, "stop", "a text or a list of texts", "5"),
    "an empty stop": (COMPLETION, {"stop": ["a", ""]}, "stop[1]", "at least 1", "a text of 0 characters"),
    "a negative token": (COMPLETION, {"prompt": [5, -7]}, "prompt[1]", "or equal to 0", "-7"),
    "a negative token of a prompt": (COMPLETION, {"prompt": [[5], [5, -7]]}, "prompt[1][1]", "or equal to 0", "-7"),
    "texts and tokens": (COMPLETION, {"prompt": [5, "k"]}, "prompt[1]", "integer", "a text of 1 character"),
    "a prompt of numbers": (COMPLETION, {"prompt": ["k", 5]}, "prompt[1]", "a text or a list of token ids", "5"),
    "a foreign token": (COMPLETION, {"prompt": [[5], [5, 9999]]}, "prompt[1]", "0 to ", "9999"),
    "a prompt too long": (COMPLETION, {"prompt": ["k", [5] * 200]}, "prompt[1]", "takes 200", "has 200 tokens"),
    "an empty prompt": (COMPLETION, {"prompt": ["k", ""]}, "prompt[1]", "at least one", "no tokens"),
    "a negative bias": (COMPLETION, {"logit_bias": {"-7": 1}}, "logit_bias[-7]", "or equal to 0", "-7"),
    "a large bias": (COMPLETION, {"logit_bias": {"7": 101}}, "logit_bias[7]", "or equal to 100", "101"),
    "a number as content": (CHAT, {"messages": [USER, {**USER, "content": 5}]}, "messages[1].content", "text", "5"),
    "a number as message": (CHAT, {"messages": [USER, 5]}, "messages[1]", "a JSON object", "5"),
    "no role": (CHAT, {"messages": [USER, {"content": "k"}]}, "messages[1].role", "required", "missing"),
    "a text as part": (
        CHAT, {"messages": [{**USER, "content": ["k"]}]}, "messages[0].content[0]", "a part", "a text of 1",
    ),
    "a part without text": (
        CHAT, {"messages": [{**USER, "content": [{"type": "text"}]}]}, "messages[0].content[0].text", "required",
        "missing",
    ),
    "a number as messages": (CHAT, {"messages": 5}, "messages", "list", "5"),
    "a text as number": (CHAT, {"n": "many"}, "n", "integer", "a text of 4 characters"),
    "a format": (CHAT, {"response_format": {"type": 5}}, "response_format.type", "'json_schema'", "5"),
}  # fmt: skip
KINDS = ["image_url", "input_image", "input_audio", "video_url", "file", "image", "anything"]
SAID |= {
    f"{kind} as part": (
        CHAT, {"messages": [USER, {**USER, "content": [{"type": "text", "text": "k"}, {"type": kind, kind: {}}]}]},
        "messages[1].content[1]", "takes text only", repr(kind),
    )
    for kind in KINDS
}  # fmt: skip


@pytest.mark.parametrize("case", SAID)
def test_a_refusal_says_where_what_is_allowed_and_what_was_given(served, case):
    path, changes, place, allowed, given = SAID[case]
    answer = post(served, path, **changes)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, place)
    assert place in error["message"]
    assert allowed in error["message"]
    assert given in error["message"]


def test_a_parameter_of_the_address_is_named(served):
    error = httpx.get(f"{served.url}/status.json?after=x").json()["error"]
    assert error["param"] == "after"
    assert error["message"].startswith("after: ")


TYPES = {
    "none": ({}, 200),
    "json": ({"Content-Type": "application/json"}, 200),
    "json in capitals": ({"Content-Type": "Application/JSON; charset=utf-8"}, 200),
    "json of a kind": ({"Content-Type": "application/vnd.api+json"}, 200),
    "text": ({"Content-Type": "text/plain"}, 400),
    "curl's form": ({"Content-Type": "application/x-www-form-urlencoded"}, 400),
    "no words": ({"Content-Type": ""}, 400),
    # A web page may send these to any address, without having asked.
    "none from a page": ({"Origin": "http://evil.example"}, 400),
    "none from a browser": ({"Sec-Fetch-Site": "cross-site"}, 400),
    "text from a page": ({"Content-Type": "text/plain", "Origin": "http://evil.example"}, 400),
}


@pytest.mark.parametrize("case", TYPES)
def test_a_body_is_json_unless_it_says_otherwise_or_a_page_sends_it(served, case):
    headers, status = TYPES[case]
    answer = httpx.post(f"{served.url}{COMPLETION}", headers=headers, content=json.dumps(BODIES[COMPLETION]))
    assert answer.status_code == status
    if status == 400:
        assert "'Content-Type: application/json'" in answer.json()["error"]["message"]


FAILING = {
    "divides by zero": "{{ 1 / 0 }}",
    "raises": "{{ raise_exception('no such role') }}",
    "takes a root of text": "{{ messages[0].content ** 0.5 }}",
    "names what is not there": "{{ nothing.there }}",
    "grows too large": "{{ 10.0 ** 400 }}",
    "calls itself": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "looks for a key": "{{ {}.popitem() }}",
    "leaves the sandbox": "{{ ''.__class__.__mro__ }}",
    "asks for all memory": "{{ 'x' * (2 ** 62) }}",
    "is no template": "{% if %}",
    "quotes all": "{{ raise_exception(messages[0].content * 100000) }}",
}


@pytest.mark.parametrize("case", FAILING)
def test_a_chat_template_that_fails_is_a_refusal(case):
    tokenizer = byte_level()
    tokenizer.chat_template = FAILING[case]
    with faked(FakeEngine([5]), tokenizer) as running:
        answer = post(running, CHAT)
        assert post(running, "/tokenize", messages=[USER]).status_code == 400
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "messages")
    assert "chat template" in error["message"]
    assert len(error["message"]) < 1000
