"""Promise: the same seed gives the same requests, and a trace's stamps and lengths stay what they are."""

import json
import math
from itertools import pairwise

import pytest

from orca_hf.bench import workload
from orca_hf.bench.workload import ClientRequest
from orca_hf.errors import RequestError

SYNTHETIC = {"prompt": (5, 9), "output": (1, 4), "vocab_size": 97}

TRACE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.0000000,10,4
2023-11-16 18:15:47.0000000,900,1
2023-11-16 18:15:48.5000000,30,2
2023-11-16 18:15:49.0000001,7,0
2023-11-16 18:15:50.0000000,20,6
"""


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_bytes(TRACE.replace("\n", "\r\n").encode())
    return path


def lengths(requests):
    return [(len(request.prompt), request.num_outputs) for request in requests]


def test_synthetic_requests_are_the_same_for_the_same_seed_only():
    once = workload.synthetic(20, rate=2.0, seed=5, **SYNTHETIC)
    assert once == workload.synthetic(20, rate=2.0, seed=5, **SYNTHETIC)
    assert once != workload.synthetic(20, rate=2.0, seed=6, **SYNTHETIC)


def test_synthetic_requests_keep_to_their_bounds():
    requests = workload.synthetic(200, rate=2.0, **SYNTHETIC)
    assert {len(request.prompt) for request in requests} == set(range(5, 10))
    assert {request.num_outputs for request in requests} == set(range(1, 5))
    assert all(3 <= token < 97 for request in requests for token in request.prompt)


def test_another_rate_is_the_same_work_at_other_times():
    slow, fast = (workload.synthetic(50, rate=rate, **SYNTHETIC) for rate in (1.0, 4.0))
    assert [request.prompt for request in slow] == [request.prompt for request in fast]
    assert lengths(slow) == lengths(fast)
    assert [request.arrival for request in slow] == pytest.approx([4 * request.arrival for request in fast])


def test_arrivals_are_poisson_from_zero_on():
    arrivals = [request.arrival for request in workload.synthetic(4001, rate=10.0, **SYNTHETIC)]
    gaps = [later - earlier for earlier, later in pairwise(arrivals)]
    assert arrivals[0] == 0
    mean = sum(gaps) / len(gaps)
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert mean == pytest.approx(0.1, rel=0.05)
    assert deviation == pytest.approx(mean, rel=0.1)  # of an exponential distribution they are the same


def test_an_infinite_rate_is_all_at_once():
    assert {request.arrival for request in workload.synthetic(9, rate=math.inf, **SYNTHETIC)} == {0.0}


@pytest.mark.parametrize(("length", "scale", "expected"), [(10, 0.5, 5), (10, 0.01, 1), (3, 2.0, 6), (10, 1.0, 10)])
def test_scaled_lengths(length, scale, expected):
    assert workload.scaled(length, scale) == expected


def test_a_trace_gives_its_lengths_and_its_stamps_by_speed(trace):
    requests = workload.azure(trace, 3, speed=2.0, max_total=800, vocab_size=97)
    assert lengths(requests) == [(10, 4), (30, 2), (20, 6)]  # without the long one and the one that generates nothing
    assert [request.arrival for request in requests] == [0.0, 1.25, 2.0]


def test_a_trace_is_read_from_a_place_that_the_seed_gives(trace):
    def read(seed):
        return lengths(workload.azure(trace, 2, speed=1.0, max_total=800, vocab_size=97, seed=seed))

    assert {tuple(read(seed)) for seed in range(10)} == {((10, 4), (30, 2)), ((30, 2), (20, 6))}
    assert read(3) == read(3)


def test_a_trace_that_is_too_short_says_so(trace):
    with pytest.raises(RequestError, match="has 3 requests of at most 800 tokens, 4 were asked for"):
        workload.azure(trace, 4, speed=1.0, max_total=800, vocab_size=97)


@pytest.mark.parametrize("text", ["a,b\n1,2\n", "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n"])
def test_a_file_that_is_no_trace_says_so(tmp_path, text):
    (tmp_path / "trace.csv").write_text(text)
    with pytest.raises(RequestError, match="is not an Azure LLM inference trace"):
        workload.azure(tmp_path / "trace.csv", 1, speed=1.0, max_total=800, vocab_size=97)


def test_a_request_file(tmp_path):
    path = tmp_path / "requests.json"
    found = [{"prompt_ids": [5, 6], "max_new_tokens": 3, "arrival_s": 0.5}, {"prompt_ids": [7], "max_new_tokens": 1}]
    path.write_text(json.dumps({"kind": "x", "requests": found}))
    assert workload.read_file(path) == [ClientRequest((5, 6), 3, 0.5), ClientRequest((7,), 1, 0.0)]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"requests": []}',
        '{"requests": [{"prompt_ids": [], "max_new_tokens": 1}]}',
        '{"requests": [{"prompt_ids": [3], "max_new_tokens": 0}]}',
        '{"requests": [{"prompt_ids": [3]}]}',
    ],
)
def test_a_file_that_is_no_request_file_says_so(tmp_path, text):
    (tmp_path / "requests.json").write_text(text)
    with pytest.raises(RequestError, match="requests"):
        workload.read_file(tmp_path / "requests.json")
