"""Promise: what the README says of serving works as it is printed."""

import contextlib
import io
import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from live import PATIENCE, FakeEngine, faked
from tokenizers_tiny import byte_level

from orca_hf import cli
from orca_hf.server import command
from orca_hf.server.protocol import ChatRequest, CompletionRequest

SECTION = Path(__file__).parents[2].joinpath("README.md").read_text().split("## Serve over HTTP\n")[1].split("\n## ")[0]
INSTALL, CURL, SNIPPET = re.findall(r"```(?:python)?\n(.*?)```", SECTION, re.DOTALL)
TOKENIZER = byte_level()


@pytest.fixture(scope="module")
def served():
    with faked(FakeEngine(TOKENIZER("é😀 ok").input_ids), TOKENIZER) as running:
        yield running


def test_the_command_is_one(monkeypatch):
    given = []
    monkeypatch.setattr(command, "run_serve", lambda arguments, write: given.append(arguments) or 0)
    program, *words = shlex.split(INSTALL.splitlines()[1])
    assert program == "orca-hf"
    assert cli.main(words) == 0
    assert given[0].model == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert given[0].host == "127.0.0.1"


def test_the_curl_line_streams(served):
    line = CURL.replace("http://127.0.0.1:8000", served.url).replace("curl ", "curl -sS ")
    done = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=PATIENCE, check=True)
    *events, end = done.stdout.strip().split("\n\n")
    assert end == "data: [DONE]"
    parts = [json.loads(event.removeprefix("data: "))["choices"][0]["delta"]["content"] for event in events]
    assert "".join(parts) == "é😀 ok"


def test_the_snippet_prints_an_answer(served):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(SNIPPET.replace("http://127.0.0.1:8000", served.url), {})
    assert printed.getvalue() == "é😀 ok\n"


def test_every_option_named_is_one_and_every_route_is_there(served):
    routes, options = (
        line.split(" | ")[1] for line in SECTION.splitlines() if line.startswith(("| routes", "| options"))
    )
    with served.http() as http:
        assert set(re.findall(r"`(/[^`]*)`", routes)) - {"/", "/openapi.json"} == {
            path for path in http.get("/openapi.json").json()["paths"] if "{" not in path
        }
    fields = {**CompletionRequest.model_fields, **ChatRequest.model_fields}
    assert {name.partition(".")[0] for name in re.findall(r"`([a-z_.]+)`", options)} <= set(fields)


def test_every_flag_named_is_one():
    with contextlib.redirect_stdout(io.StringIO()) as printed, pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    flags = set(re.findall(r"--[a-z][a-z-]+", SECTION))
    assert flags <= set(re.findall(r"--[a-z][a-z-]+", printed.getvalue()))
    assert len(flags) > 5
