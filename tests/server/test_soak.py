"""Promise: under requests of all kinds nothing is wrong, nothing fails, and nothing is left when they are over."""

import json
import random
import sys
from dataclasses import replace

import pytest

from orca_hf import cli
from orca_hf.bench.live_server import live_server
from orca_hf.bench.soak import Point, passed
from orca_hf.bench.soak_clients import AnswerError, _answer, _same
from orca_hf.bench.soak_requests import malformed, proper
from orca_hf.errors import OrcaError
from orca_hf.server.protocol import ChatRequest, CompletionRequest


def test_soak(tmp_path, capsys):
    out, plot = tmp_path / "soak.json", tmp_path / "soak.png"
    sizes = ["--requests", "150", "--distinct", "40", "--rate", "30", "--max-batch-size", "4", "--max-slots", "1024"]
    status = cli.main(["bench", "soak", "--seed", "1", *sizes, "--out", str(out), "--plot", str(plot)])
    (point,) = json.loads(out.read_text())["points"]
    assert point["faults"] == []
    assert point["broken"] == point["server_errors"] == point["failed"] == point["open"] == point["reserved"] == 0
    assert point["answered"] + point["left"] + point["malformed"] + point["busy"] == point["requests"] == 150
    assert min(point["answered"], point["left"], point["malformed"]) > 0
    assert point["end_mib"] <= 1.05 * point["warm_mib"]
    assert status == 0
    assert "answered" in capsys.readouterr().out
    assert plot.read_bytes().startswith(b"\x89PNG")


GOOD = Point(
    requests=10, answered=7, left=2, malformed=1, busy=0, broken=0, faults=(), server_errors=0, failed=0, open=0,
    reserved=0, seconds=1.0, warm_mib=100.0, end_mib=104.0,
)  # fmt: skip
BAD = {"broken": 1, "server_errors": 1, "failed": 1, "open": 1, "reserved": 16, "answered": 6, "end_mib": 106.0}


@pytest.mark.parametrize("fault", [None, *BAD])
def test_whatever_is_wrong_fails_it(fault):
    assert passed([GOOD if fault is None else replace(GOOD, **{fault: BAD[fault]})]) == (fault is None)


def choice(text, reason=None, **more):
    return {"choices": [{"index": 0, "text": text, "finish_reason": reason, "logprobs": None, **more}]}


WHOLE = {**choice("abc", "stop"), "usage": {"completion_tokens": 3}}
STREAM = [choice("a"), choice("bc", "stop"), {"choices": [], "usage": {"completion_tokens": 3}}]
OTHERS = {
    "another text": [choice("a"), choice("b", "stop"), STREAM[2]],
    "another reason": [choice("a"), choice("bc", "length"), STREAM[2]],
    "another count": [*STREAM[:2], {"choices": [], "usage": {"completion_tokens": 2}}],
    "another choice": [*STREAM, {"choices": [{"index": 1, "text": "", "finish_reason": None, "logprobs": None}]}],
    "log-probabilities": [choice("a", logprobs={"token_logprobs": [-1.0]}), *STREAM[1:]],
}


@pytest.mark.parametrize("case", ["the same", *OTHERS])
def test_another_answer_is_seen_to_be_one(case):
    assert _same(_answer(OTHERS.get(case, STREAM)), _answer([WHOLE])) == (case == "the same")


def test_rounding_is_not_another_answer_and_an_error_is_none():
    assert _same({"logprobs": [-1.0]}, {"logprobs": [-1.0000001]})
    assert not _same({"logprobs": [-1.0]}, {"logprobs": [-1.1]})
    with pytest.raises(AnswerError, match="an error in the answer"):
        _answer([choice("a"), {"error": {"message": "no"}}])


def test_requests_are_what_the_protocol_has_and_the_same_each_time():
    requests = [proper(random.Random(seed)) for seed in range(200)]
    assert requests == [proper(random.Random(seed)) for seed in range(200)]
    seen = set()
    for request in requests:
        body = json.loads(request.body)
        (ChatRequest if "messages" in body else CompletionRequest).model_validate(body)
        assert body["temperature"] == 0 or "seed" in body
        assert not json.loads(request.whole.body)["stream"]
        seen |= body.keys()
    assert {"stop", "n", "logit_bias", "logprobs", "echo", "top_p", "stream_options", "repetition_penalty"} <= seen
    assert len({malformed(random.Random(seed)) for seed in range(200)}) > 10


def test_without_a_client_library_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "httpx", None)
    monkeypatch.delitem(sys.modules, "orca_hf.bench.soak_clients")
    assert cli.main(["bench", "soak"]) == 1
    assert capsys.readouterr().err == "orca-hf: httpx is missing, which a soak needs: pip install 'orca-hf[bench]'.\n"


def test_a_server_that_does_not_come_up_is_an_error(tmp_path, capfd):
    with pytest.raises(OrcaError, match="has not come up"), live_server(str(tmp_path), []):
        pytest.fail("it runs")
    assert "orca-hf: " in capfd.readouterr().err
