"""Promise: whatever numbers a request samples by, it gets tokens or a sentence, and where native has tokens, those."""

import itertools

import pytest
import torch
from live import live
from tiny import make_model
from tokenizers_tiny import byte_level

import orca_hf

TOKENIZER = byte_level()
PROMPT = [5, 6, 7, 5]
VOCAB = make_model().config.vocab_size

# By the field: what fp32, or a sum of several of them, might not hold.
EXTREMES = {
    "temperature": [1e-45, 1e-38, 1e-12, 2],
    "repetition_penalty": [1e-45, 1e-40, 1e-15, 100],
    "top_p": [5e-324, 1e-45, 1e-7, 1],
    "min_p": [5e-324, 1e-45, 1],
    "top_k": [-1, 0, 1, 2**31 - 1],
    "presence_penalty": [-2, 2],
    "frequency_penalty": [-2, 2],
    "logit_bias": [
        {"5": 100},
        {"5": -100, "6": 1e-45},
        {str(i): -100 for i in range(VOCAB)},
        {str(i): 100 for i in range(VOCAB)},
    ],
}
ALONE = [{name: value} for name, values in EXTREMES.items() for value in values]
SMALLEST = {name: values[0] for name, values in EXTREMES.items()}
LARGEST = {name: values[-1] for name, values in EXTREMES.items()}
TOGETHER = [
    {**SMALLEST, **{name: LARGEST[name] for name in names}} for names in itertools.combinations(EXTREMES, 2)
] + [SMALLEST, LARGEST]


@pytest.fixture(scope="module")
def model():
    return make_model()


@pytest.fixture(scope="module")
def served(model):
    with live(orca_hf.engine(model), model, TOKENIZER) as running, running.http() as http:
        yield http


@pytest.mark.parametrize("options", ALONE + TOGETHER, ids=str)
@pytest.mark.parametrize("sampled", [True, False], ids=["sampled", "greedy"])
def test_every_number_that_is_taken_gives_tokens(served, options, sampled):
    body = {"prompt": PROMPT, "max_tokens": 8, "seed": 3, "temperature": float(sampled), **options}
    if not sampled:
        body["temperature"] = 0
    answer = served.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1e-20},
        {"temperature": 1e-12, "top_p": 0.9},
        {"repetition_penalty": 1e-12},
        {"temperature": 1e-9, "repetition_penalty": 1e-9},
        {"temperature": 1.5, "min_p": 1e-30, "top_p": 1e-30},
    ],
    ids=str,
)
def test_where_native_can_sample_the_tokens_are_natives(served, options):
    torch.manual_seed(3)
    row = make_model().generate(torch.tensor([PROMPT]), do_sample=True, max_new_tokens=8, **options)
    answer = served.post(
        "/v1/completions", json={"prompt": PROMPT, "max_tokens": 8, "seed": 3, "echo": True, **options}
    )
    assert answer.json()["choices"][0]["text"] == TOKENIZER.decode(row[0], skip_special_tokens=True)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"temperature": -1e-45}, "temperature"),
        ({"temperature": 2.01}, "temperature"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 1e-400}, "repetition_penalty"),
        ({"top_p": 0}, "top_p"),
        ({"min_p": -1e-9}, "min_p"),
        ({"logit_bias": {"5": 1e30}}, "logit_bias"),
        ({"presence_penalty": 1e9}, "presence_penalty"),
    ],
    ids=str,
)
def test_a_number_out_of_bounds_is_named(served, options, field):
    answer = served.post("/v1/completions", json={"prompt": PROMPT, **options})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(field)
