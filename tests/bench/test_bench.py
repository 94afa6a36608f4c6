"""Promise: each subcommand of `orca-hf bench` measures, and leaves a table, a JSON file and a plot."""

import json
import math
import sys
from dataclasses import fields
from importlib import import_module

import pytest
import torch
from tiny import make_model
from tokenizers_tiny import byte_level

from orca_hf import cli
from orca_hf.bench.arguments import COMMANDS
from orca_hf.bench.metrics import Spread
from orca_hf.errors import OrcaError

REQUESTS = [([5, 6, 7], 4), ([8] * 9, 2), ([9, 10], 6)]

# Prints what a peer prints, among other lines, and answers each request with its first token, over and over.
PEER = """
import argparse, json
p = argparse.ArgumentParser()
for name in ("model", "requests", "out"):
    p.add_argument("--" + name)
a = p.parse_args()
requests = json.load(open(a.requests))["requests"]
json.dump([[r["prompt_ids"][0]] * r["max_new_tokens"] for r in requests], open(a.out, "w"))
print("loading", a.model)
print(json.dumps({"peer": "first token", "seconds": 0.5}))
print("bye")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    make_model("llama").save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def request_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("requests") / "requests.json"
    found = [{"prompt_ids": prompt, "max_new_tokens": count, "arrival_s": 0.0} for prompt, count in REQUESTS]
    path.write_text(json.dumps({"requests": found}))
    return path


@pytest.fixture
def bench(folder, tmp_path, capsys):
    """Runs a subcommand; returns exit status, the JSON and the table."""

    def run(name, *options, model=True):
        out, plot = tmp_path / f"{name}.json", tmp_path / f"{name}.png"
        common = ["--model", str(folder), "--max-slots", "2048", "--repeats", "2"] if model else []
        status = cli.main(["bench", name, "--out", str(out), "--plot", str(plot), *common, *options])
        assert plot.read_bytes().startswith(b"\x89PNG")
        result = json.loads(out.read_text())
        documented = import_module(f"orca_hf.bench.{name}").Point
        assert result.keys() == {"bench", "settings", "machine", "points"}
        assert result["bench"] == name
        assert result["machine"]["torch"] == torch.__version__
        for point in result["points"]:
            assert list(point) == [field.name for field in fields(documented)]
            assert all(f"        {field}: " in documented.__doc__ for field in point)
        return status, result, capsys.readouterr().out

    return run


def is_spread(value):
    return value.keys() == {"median", "low", "high"} and 0 < value["low"] <= value["median"] <= value["high"]


def test_engine(bench):
    status, result, text = bench(
        "engine", "--batch-sizes", "1,4", "--prompt-lens", "5,20", "--output-len", "3", "--threads", "1"
    )
    assert status == 0
    assert result["settings"]["batch_sizes"] == [1, 4]
    points = result["points"]
    assert {(p["engine"], p["prompt_len"], p["batch_size"]) for p in points} == {
        (engine, prompt_len, size) for engine in ("orca", "native") for prompt_len in (5, 20) for size in (1, 4)
    }
    for point in points:
        assert is_spread(point["seconds"])
        seconds = point["seconds"]["median"]
        assert point["seconds_per_token"]["median"] == pytest.approx(seconds / 3)
        assert point["tokens_per_second"]["high"] == pytest.approx(3 * point["batch_size"] / point["seconds"]["low"])
    assert len(text.splitlines()) == 1 + len(points)


def test_trace_of_synthetic_requests(bench):
    lengths = ("--prompt", "4-20", "--output", "1-6", "--requests", "6", "--rates", "200,inf")
    status, result, text = bench("trace", "--max-batch-size", "1,4", *lengths)
    assert status == 0
    points = result["points"]
    assert {(p["system"], p["max_batch_size"], p["rate"]) for p in points} == {
        (system, size, rate) for system in ("orca", "request", "native") for size in (1, 4) for rate in (200, "inf")
    }
    for point in points:
        assert point["requests"] == 6
        for figure in ("throughput", "latency_median", "latency_mean", "ttft_median", "ttft_p99", "tpot_median"):
            assert is_spread(point[figure])
        assert point["gap_p99"]["median"] > 0
        assert point["ttft_median"]["median"] <= point["ttft_p99"]["median"]
        assert 0 <= point["within_limits"]["median"] <= 1
        if point["system"] == "native":
            assert point["slots_reserved"] is None
            assert point["slots_used"] is None
        else:
            assert 0 < point["slots_reserved"]["median"] < 1
            assert 0 < point["slots_used"]["median"] <= 1
    assert "Goodput" in text
    assert "request, 4" in text


def test_what_json_does_not_know_is_written_otherwise(tmp_path):
    from orca_hf.bench.report import write_json

    point = Spread(math.nan, -math.inf, 1.5)
    write_json(str(tmp_path / "x.json"), cli_arguments("trace", "--rates", "1,inf"), [point])
    result = json.loads((tmp_path / "x.json").read_text(), parse_constant=pytest.fail)
    assert result["settings"]["rates"] == [1.0, "inf"]
    assert result["points"] == [{"median": None, "low": "-inf", "high": 1.5}]


def test_trace_of_stamps(bench, tmp_path):
    rows = [f"2023-11-16 18:15:46.{index}000000,{40 + index},{8 + index}" for index in range(9)]
    csv = tmp_path / "trace.csv"
    csv.write_text("\r\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    options = ("--scheduler", "orca", "--max-batch-size", "4", "--trace", str(csv), "--speed", "10,40")
    status, result, _ = bench("trace", *options, "--requests", "5", "--scale", "0.25")
    assert status == 0
    assert [p["rate"] for p in result["points"]] == pytest.approx([5 / 0.04, 5 / 0.01])


def test_scheduler(bench):
    options = ("--running", "8", "--waiting", "100", "--iterations", "50")
    status, result, text = bench("scheduler", *options, model=False)
    assert status == 0
    assert [point["clock"] for point in result["points"]] == ["wall", "cpu"]
    for point in result["points"]:
        assert (point["running"], point["waiting"], point["iterations"]) == (8, 100, 50)
        assert 0 < point["median_ms"] <= point["p99_ms"] <= point["max_ms"]
        assert point["percentiles_ms"] == sorted(point["percentiles_ms"])
        assert len(point["percentiles_ms"]) == 101
    assert "p99 ms" in text


def test_replay(bench, request_file, tmp_path):
    (tmp_path / "first_token.py").write_text(PEER)
    (tmp_path / "broken.py").write_text("raise SystemExit('no such engine')")
    (tmp_path / "silent.py").write_text("")
    peers = ("--peer-runners", str(tmp_path), "--peer-python", f"first_token={sys.executable}")
    status, result, text = bench(
        "replay", "--requests", str(request_file), *peers, "--peers", "first_token,broken,silent"
    )
    points = {point["engine"]: point for point in result["points"]}
    assert list(points) == ["orca", "native, one batch", "native, one at a time", "first_token", "broken", "silent"]
    for name in ("orca", "native, one batch", "native, one at a time", "first_token"):
        assert is_spread(points[name]["seconds"])
        assert is_spread(points[name]["orca_speed"])
        assert points[name]["output_tokens"] == 12
        assert (points[name]["equal_rows"], points[name]["rows"]) == (0 if name == "first_token" else 3, 3)
    assert points["orca"]["orca_speed"] == {"median": 1, "low": 1, "high": 1}
    assert points["first_token"]["tokens_per_second"]["median"] == 24
    assert status == 1, "two peers failed"
    assert "broken failed: exit status 1: no such engine" in text
    assert "silent failed: it printed no result" in text


def test_replay_fails_when_tokens_differ(bench, request_file, monkeypatch):
    monkeypatch.setattr("orca_hf.outcome.greedy_tokens", lambda logits: torch.argmin(logits, dim=-1).tolist())
    status, result, _ = bench("replay", "--requests", str(request_file))
    assert status == 1
    assert [point["equal_rows"] for point in result["points"]] == [0, 3, 3]


def test_replay_needs_the_runners_of_its_peers(folder, request_file, tmp_path, capsys):
    command = ["bench", "replay", "--model", str(folder), "--requests", str(request_file), "--peers", "vllm"]
    assert cli.main(command) == 1
    assert "--peers needs --peer-runners" in capsys.readouterr().err
    assert cli.main([*command, "--peer-runners", str(tmp_path)]) == 1
    assert "vllm.py" in capsys.readouterr().err


def test_shapes(bench):
    status, result, text = bench("shapes", "--long-prompt", "40", "--repeats", "1")
    assert status == 0
    assert len(result["points"]) >= 10
    for point in result["points"]:
        assert all(is_spread(point[figure]) for figure in ("orca_seconds", "native_seconds", "speed"))
        assert point["slower"] == (point["speed"]["median"] < 0.97)
        assert point["shape"] in text
    assert text.count("SLOWER") == sum(point["slower"] for point in result["points"])


def test_shapes_can_be_chosen(bench, folder, capsys):
    _, result, _ = bench("shapes", "--only", "short-8,streamer")
    assert [point["shape"] for point in result["points"]] == ["short-8", "streamer"]
    assert cli.main(["bench", "shapes", "--model", str(folder), "--only", "round"]) == 1
    assert "There is no shape round; there are: short-1" in capsys.readouterr().err


def test_the_end_token_of_a_shape_is_the_first_that_comes(folder):
    from orca_hf.bench.shapes import shapes
    from orca_hf.bench.subject import Subject

    arguments = cli_arguments("shapes", "--model", str(folder))
    subject = Subject(arguments)
    (call,) = shapes(subject, 40, seed=0)["immediate-eos"]
    assert subject.native(**call).shape[1] == call["input_ids"].shape[1] + 1


def test_clients(bench, folder):
    byte_level().save_pretrained(folder)
    status, result, text = bench("clients", "--clients", "5", "--prompt", "4-9", "--output", "1-6", "--threads", "1")
    assert status == 0
    python, http = result["points"]
    assert (python["way"], http["way"]) == ("python", "http")
    for point in (python, http):
        assert all(is_spread(point[figure]) for figure in ("seconds", "tokens_per_second", "share"))
        assert point["clients"] == 5
        num_tokens = point["seconds"]["high"] * point["tokens_per_second"]["low"]
        assert 5 <= num_tokens == pytest.approx(round(num_tokens))
    assert python["share"] == {"median": 1, "low": 1, "high": 1}
    assert "of python's" in text


def test_what_runs_natively_is_not_measured_as_orca(folder):
    from orca_hf.bench.subject import Subject, ready

    subject = Subject(cli_arguments("shapes", "--model", str(folder)))
    call = {"input_ids": torch.tensor([[5, 6]]), "max_new_tokens": 2, "num_beams": 2}
    with pytest.raises(OrcaError, match="beam_search"), ready(subject.orca(), call):
        raise AssertionError("it must not come to this")


@pytest.mark.parametrize("name", COMMANDS)
def test_a_plot_without_matplotlib_is_refused_before_anything_is_measured(name, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    required = ["--requests", "nothing.json"] if name == "replay" else []
    assert (
        cli.main(["bench", name, *required, "--plot", str(tmp_path / "x.png"), "--out", str(tmp_path / "x.json")]) == 1
    )
    assert "pip install 'orca-hf[bench]'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "options",
    [
        ["engine", "--batch-sizes", "0"],
        ["trace", "--scheduler", "fifo"],
        ["trace", "--rates", "0"],
        ["trace", "--prompt", "9-3"],
        ["replay", "--requests", "x", "--peer-model", "vllm"],
        ["replay"],
        [],
    ],
)
def test_options_that_cannot_be_are_refused(options, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["bench", *options])
    assert "usage: orca-hf bench" in capsys.readouterr().err


def cli_arguments(*words):
    import argparse

    from orca_hf.bench.arguments import add_bench

    parser = argparse.ArgumentParser()
    add_bench(parser.add_subparsers())
    return parser.parse_args(["bench", *words])
