"""Promise: a server that is told to stop finishes what it has accepted, within its grace, and tells who is too late."""

import http.client
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch
from live import PATIENCE, FakeEngine, faked, live
from openai import APIError, APIStatusError
from tiny import make_model
from tokenizers_tiny import byte_level

import orca_hf
from orca_hf.server import command

TOKENIZER = byte_level()


def test_what_runs_is_finished_and_nothing_new_is_taken():
    engine = FakeEngine()
    with faked(engine, TOKENIZER, grace=PATIENCE) as running, ThreadPoolExecutor() as pool:
        waiting = pool.submit(running.openai().completions.create, model="tiny", prompt="k")
        stream = running.openai().completions.create(model="tiny", prompt="k", stream=True)
        for handle in engine.wait_for(2):
            handle.say(*TOKENIZER("ok").input_ids)
        running.stop()
        running.wait_until_closed()
        for handle in engine.handles:
            handle.say(*TOKENIZER(" ends").input_ids)
            handle.end()
        assert waiting.result(PATIENCE).choices[0].text == "ok ends"
        assert "".join(chunk.choices[0].text for chunk in stream) == "ok ends"
        running.join()


def test_what_outlasts_the_grace_is_cancelled_and_told():
    engine = FakeEngine()
    with faked(engine, TOKENIZER, grace=0.0) as running, ThreadPoolExecutor() as pool:
        waiting = pool.submit(running.openai().completions.create, model="tiny", prompt="k")
        stream = running.openai().completions.create(model="tiny", prompt="k", stream=True)
        handles = engine.wait_for(2)
        running.stop()
        with pytest.raises(APIStatusError, match="shutting down") as told:
            waiting.result(PATIENCE)
        assert told.value.status_code == 503
        with pytest.raises(APIError, match="shutting down"):
            list(stream)
        assert all(handle.cancelled.wait(PATIENCE) for handle in handles)
        running.join()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_what_is_still_in_preparation_is_told_in_the_same_form(path):
    begun, released = threading.Event(), threading.Event()

    def prepared_for_long(prompt, **given):
        begun.set()
        released.wait(PATIENCE)
        return FakeEngine.submit(engine, prompt, **given)

    engine = FakeEngine()
    engine.submit = prepared_for_long
    with faked(engine, TOKENIZER, grace=0.0) as running, ThreadPoolExecutor() as pool:
        body = {"prompt": "k"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "k"}]}
        waiting = pool.submit(httpx.post, f"{running.url}{path}", json=body, timeout=PATIENCE)
        assert begun.wait(PATIENCE)
        running.stop()
        answer = waiting.result(PATIENCE)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
        released.set()


def test_so_is_who_has_not_sent_all_of_it(monkeypatch):
    monkeypatch.setattr(command, "_LAST_WORDS", 0.1)
    with (
        faked(FakeEngine(), TOKENIZER, grace=0.0) as running,
        socket.create_connection(running.address, PATIENCE) as connection,
    ):
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\n"
        connection.sendall(head + b"Content-Length: 9\r\n\r\n")
        assert connection.recv(25) == b"HTTP/1.1 100 Continue\r\n\r\n"  # its body is waited for
        running.stop()
        response = http.client.HTTPResponse(connection)
        response.begin()
        assert (response.status, json.loads(response.read())["error"]["code"]) == (503, "shutting_down")


def test_nothing_accepted_is_lost_under_load():
    model = make_model("llama")
    prompts = [[5 + i, 6, 7 + i] for i in range(24)]
    expected = []
    for prompt in prompts:
        tokens = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=30)[0, 3:].tolist()
        expected.append(tokens)
    accepted = queue.Queue()
    engine = orca_hf.engine(model)
    submit = engine.submit

    def counted(*args, **options):
        handle = submit(*args, **options)
        accepted.put(handle)
        return handle

    engine.submit = counted
    with live(engine, model, TOKENIZER, grace=PATIENCE, max_model_len=128) as running, ThreadPoolExecutor(24) as pool:
        url = f"{running.url}/v1/completions"
        bodies = [{"prompt": prompt, "max_tokens": 30, "temperature": 0, "logprobs": 0} for prompt in prompts]
        sent = [pool.submit(httpx.post, url, json=body, timeout=PATIENCE) for body in bodies]
        for _ in range(12):
            accepted.get(timeout=PATIENCE)
        running.stop()
        num_answered = 0
        for each, tokens in zip(sent, expected, strict=True):
            if each.exception(PATIENCE) is not None:
                assert isinstance(each.exception(), httpx.ConnectError | httpx.ReadError | httpx.RemoteProtocolError)
                continue
            if each.result().status_code == 200:
                num_answered += 1
                assert each.result().json()["usage"]["completion_tokens"] == len(tokens)
            else:
                assert each.result().json()["error"]["code"] == "shutting_down"
        running.join()
    assert num_answered == 12 + accepted.qsize()


def test_the_command_serves_a_folder_until_sigterm(tmp_path):
    model = make_model("llama")
    model.save_pretrained(tmp_path / "tiny")
    TOKENIZER.save_pretrained(tmp_path / "tiny")
    command = [
        sys.executable,
        "-m",
        "orca_hf.cli",
        "serve",
        str(tmp_path / "tiny"),
        "--port",
        "0",
        "--log-level",
        "error",
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    guard = threading.Timer(4 * PATIENCE, process.kill)
    guard.start()
    try:
        lines = iter(process.stdout.readline, "")
        url = next(line for line in lines if line.startswith("Serving tiny on ")).split()[-1]
        with httpx.Client(base_url=url, transport=httpx.HTTPTransport(retries=8), timeout=PATIENCE) as client:
            got = client.post("/v1/completions", json={"prompt": [5, 6], "max_tokens": 8, "temperature": 0}).json()
            native = model.generate(torch.tensor([[5, 6]]), max_new_tokens=8, do_sample=False)[0].tolist()
            assert got["choices"][0]["text"] == TOKENIZER.decode(native).removeprefix(TOKENIZER.decode([5, 6]))
            assert got["model"] == "tiny"
            endless = {"prompt": "k", "max_tokens": 100, "stream": True}
            with client.stream("POST", "/v1/completions", json=endless) as response:
                lines = response.iter_lines()
                first = next(lines)
                process.send_signal(signal.SIGTERM)
                events = [line for line in [first, *lines] if line]
        assert events[-1] == "data: [DONE]"
        assert json.loads(events[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert process.wait(PATIENCE) in (0, -signal.SIGTERM)  # uvicorn repeats the signal when all is done
    finally:
        guard.cancel()
        process.kill()
        process.wait()
