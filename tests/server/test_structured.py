"""Promise: an answer that must be JSON is JSON of its schema, from a model that says anything; other answers go on."""

import builtins
import json

import jsonschema_rs
import pytest
from live import live
from openai import BadRequestError
from tiny import make_model
from tokenizers_tiny import byte_level, sentencepiece

import orca_hf

VOCAB = 120
TOKENIZER = byte_level(VOCAB)
CHAT = [{"role": "user", "content": "ok"}]
SCHEMAS = {
    "an object": {
        "type": "object",
        "properties": {"a": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 3}, "b": {"const": "x y"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
    "a choice": {"enum": ["ok", "stop"]},
    "a truth": {"type": "boolean"},
    "a pattern": {"type": "string", "pattern": "^(ab)+$", "maxLength": 8},
    "a reference": {
        "$defs": {"d": {"enum": ["a", "b"]}},
        "type": "array",
        "items": {"$ref": "#/$defs/d"},
        "maxItems": 2,
    },
}


@pytest.fixture(scope="module")
def served():
    model = make_model("llama", vocab_size=VOCAB, max_position_embeddings=512)
    model.generation_config.eos_token_id = TOKENIZER.eos_token_id
    with live(orca_hf.engine(model), model, TOKENIZER, max_model_len=512) as running:
        yield running


def schema_format(schema):
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("temperature", [0, 1.5])
def test_every_answer_follows_its_schema(served, name, temperature):
    # A random model could write spaces for ever, which JSON allows; the penalty is against that.
    given = {"model": "tiny", "messages": CHAT, "response_format": schema_format(SCHEMAS[name]), "frequency_penalty": 2}
    given |= {"n": 4, "seed": 3, "max_tokens": 200, "temperature": temperature}
    create = served.openai().chat.completions.create
    got = create(**given)
    for choice in got.choices:
        assert choice.finish_reason == "stop"
        jsonschema_rs.validate(SCHEMAS[name], json.loads(choice.message.content))
    streamed = {}
    for chunk in create(**given, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] = streamed.get(choice.index, "") + (choice.delta.content or "")
    assert [streamed[i] for i in range(4)] == [choice.message.content for choice in got.choices]


def test_a_json_object_is_one(served):
    got = served.openai().completions.create(
        model="tiny", prompt="ok", max_tokens=300, temperature=0,
        logit_bias=dict.fromkeys(TOKENIZER("{}").input_ids, 50),
        extra_body={"response_format": {"type": "json_object"}},
    )  # fmt: skip
    assert isinstance(json.loads(got.choices[0].text), dict)


def test_text_is_free(served):
    create = served.openai().completions.create
    plain = {"model": "tiny", "prompt": "ok", "temperature": 0}
    free = create(**plain, extra_body={"response_format": {"type": "text"}})
    assert free.choices[0].text == create(**plain).choices[0].text


WRONG = {
    "no schema": ({"type": "json_schema"}, "schema is missing"),
    "no type": (schema_format({"type": "nonsense"}), "cannot be followed"),
    "a broken pattern": (schema_format({"type": "string", "pattern": "("}), "cannot be followed"),
    "a file": (schema_format({"$ref": "file:///etc/passwd"}), "does not fetch"),
    "a web page": (schema_format({"$ref": "http://localhost/schema.json"}), "does not fetch"),
    "another type": ({"type": "xml"}, "response_format"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_schema_that_cannot_be_followed_is_told(served, case):
    given, words = WRONG[case]
    with pytest.raises(BadRequestError, match=words):
        served.openai().chat.completions.create(model="tiny", messages=CHAT, response_format=given)


def test_without_llguidance_the_answer_says_what_to_install(served, monkeypatch):
    genuine = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "llguidance":
            raise ImportError(name)
        return genuine(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(BadRequestError, match=r"pip install 'orca-hf\[structured\]'"):
        served.openai().chat.completions.create(model="tiny", messages=CHAT, response_format=schema_format({}))


def test_a_schema_that_gets_too_intricate_on_the_way_is_told(served):
    """llguidance gives up, which is no end of an answer."""
    many = {"type": "object", "properties": {f"p{i:03}": {} for i in range(800)}}
    with pytest.raises(BadRequestError, match="cannot be followed"):
        served.openai().chat.completions.create(model="tiny", messages=CHAT, response_format=schema_format(many))


@pytest.mark.parametrize("temperature", [0, 1])
def test_an_answer_whose_every_token_is_forbidden_says_so(temperature):
    model = make_model("llama", vocab_size=VOCAB)
    model.generation_config.eos_token_id = TOKENIZER.eos_token_id
    model.generation_config.suppress_tokens = list(range(3, VOCAB))
    with live(orca_hf.engine(model), model, TOKENIZER) as running, pytest.raises(BadRequestError, match="forbid every"):
        running.openai().chat.completions.create(
            model="tiny", messages=CHAT, response_format=schema_format({"enum": ["ok"]}), temperature=temperature
        )


@pytest.mark.parametrize("schema", [{"enum": ["x" * 2**17]}, {"pattern": "(a|b)" * 2**15}], ids=["texts", "pattern"])
def test_a_schema_that_is_too_long_says_how_long_it_may_be(served, schema):
    with pytest.raises(BadRequestError, match="at most 131072"):
        served.openai().chat.completions.create(model="tiny", messages=CHAT, response_format=schema_format(schema))


@pytest.mark.parametrize(
    ("tokenizer", "eos", "words"),
    [
        (TOKENIZER, None, "no end-of-sequence token"),
        (sentencepiece(fallback=False), 2, "cannot work with this model's"),
    ],
)
def test_a_model_that_cannot_give_json_says_why(tokenizer, eos, words):
    model = make_model("llama", vocab_size=VOCAB)
    model.generation_config.eos_token_id = eos
    with live(orca_hf.engine(model), model, tokenizer) as running, pytest.raises(BadRequestError, match=words):
        running.openai().completions.create(
            model="tiny", prompt=[5], extra_body={"response_format": {"type": "json_object"}}
        )
