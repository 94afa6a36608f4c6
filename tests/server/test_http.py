"""Promise: HTTP as its specification has it, errors in one form, and clients that say nothing keep nobody out."""

import http.client
import json
import socket
from contextlib import ExitStack
from types import SimpleNamespace

import httpx
import pytest
from live import PATIENCE, FakeEngine, faked
from tokenizers_tiny import byte_level

TOKENIZER = byte_level()
OK = TOKENIZER("ok").input_ids


@pytest.fixture(scope="module")
def served():
    with faked(FakeEngine([5]), TOKENIZER) as running:
        yield running


class Wire(socket.socket):
    """A connection whose responses are read one after the other."""

    def __init__(self, running):
        super().__init__()
        self.settimeout(PATIENCE)
        self.connect(running.address)
        self._file = super().makefile("rb")

    def makefile(self, *args, **kwargs):
        """What a response is read from, and closes at its end: the next one reads on there."""
        lent = SimpleNamespace(close=lambda: None, flush=lambda: None)
        for name in ("read", "readline", "readinto", "read1", "peek"):
            setattr(lent, name, getattr(self._file, name))
        return lent

    def close(self):
        self._file.close()
        super().close()


def connect(running):
    return Wire(running)


def request(path="/v1/completions", method="POST", **body):
    data = json.dumps({"prompt": "k", **body}).encode() if method == "POST" else b""
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def read(connection, method="POST"):
    """The next response, as Python's own client reads it: status, headers, body."""
    response = http.client.HTTPResponse(connection, method=method)
    response.begin()
    return response.status, response.headers, response.read()


def is_closed(connection):
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def error_of(body):
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def finish(handles):
    for handle in handles:
        handle.say(*OK)
        handle.end()


def test_who_has_sent_all_may_close_that_side_and_wait():
    engine = FakeEngine()
    with faked(engine, TOKENIZER) as running, connect(running) as connection:
        connection.sendall(request())
        (handle,) = engine.wait_for(1)
        connection.shutdown(socket.SHUT_WR)
        # What the server writes meanwhile, to see that somebody is there, is in the specification too.
        assert connection.recv(25, socket.MSG_PEEK).startswith(b"HTTP/1.1 100 Continue")
        finish([handle])
        status, _, body = read(connection)
        assert (status, json.loads(body)["choices"][0]["text"]) == (200, "ok")
        assert is_closed(connection)


def test_so_it_may_for_a_stream():
    engine = FakeEngine()
    with faked(engine, TOKENIZER) as running, connect(running) as connection:
        connection.sendall(request(stream=True))
        connection.shutdown(socket.SHUT_WR)
        (handle,) = engine.wait_for(1)
        finish([handle])
        status, _, body = read(connection)
        events = [line for line in body.decode().split("\n\n") if line.startswith("data: {")]
        texts = [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events]
        assert (status, "".join(texts)) == (200, "ok")
        assert b"[DONE]" in body


def test_so_it_may_for_several_requests_that_follow_each_other(served):
    with connect(served) as connection:
        connection.sendall(request() + request("/health", "GET") + request(max_tokens=1))
        connection.shutdown(socket.SHUT_WR)
        assert [read(connection)[0] for _ in range(3)] == [200, 200, 200]
        assert is_closed(connection)


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_so_it_may_in_every_version(served, version):
    with connect(served) as connection:
        connection.sendall(request().replace(b"HTTP/1.1", f"HTTP/{version}".encode()))
        connection.shutdown(socket.SHUT_WR)
        assert read(connection)[0] == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("closes_first", [False, True])
def test_a_client_that_is_gone_is_noticed_without_a_token(stream, closes_first):
    engine = FakeEngine()
    with faked(engine, TOKENIZER, max_open=1) as running:
        connection = connect(running)
        connection.sendall(request(stream=stream))
        (handle,) = engine.wait_for(1)
        if closes_first:
            connection.shutdown(socket.SHUT_WR)
        connection.close()
        assert handle.cancelled.wait(PATIENCE)


@pytest.mark.parametrize("sent", [b"", b"GET", b"POST / HTTP/1.1\r\nHost: localhost\r\n", request()[:-1]])
def test_a_request_that_ends_too_early_is_dropped(served, sent):
    with connect(served) as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        assert is_closed(connection)


SLOW = {
    "nothing": b"",
    "half a head": b"POST /v1/completions HTTP/1.1\r\nHost: loc",
    "half a body": request()[:-1],
    "no body": request().partition(b"\r\n\r\n")[0] + b"\r\n\r\n",
    "half a second request": b"GET /health HT",
}


@pytest.mark.parametrize("case", SLOW)
def test_patience_with_a_slow_client_ends(case):
    with faked(FakeEngine([5]), TOKENIZER, client_timeout=0.1) as running, connect(running) as connection:
        if case == "half a second request":
            connection.sendall(request("/health", "GET"))
            assert read(connection)[0] == 200
        connection.sendall(SLOW[case])
        status, headers, body = read(connection)
        assert (status, headers["connection"]) == (408, "close")
        assert error_of(body)["code"] == "request_timeout"
        assert is_closed(connection)
        assert running.service.limits.num_open == 0


def test_bytes_that_trickle_do_not_buy_a_head_more_time():
    with faked(FakeEngine([5]), TOKENIZER, client_timeout=0.3) as running, connect(running) as connection:
        connection.settimeout(0.02)
        answer = b""
        for _ in range(PATIENCE * 50):
            connection.send(b"G")
            try:
                answer = connection.recv(4096)
                break
            except TimeoutError:
                continue
        assert answer.startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize("opening", ["", "GET / HTTP/1.1\r\nHost: localhost\r\nX-Slow: ", request()[:-1].decode()])
def test_many_who_say_nothing_keep_nobody_out(opening):
    with faked(FakeEngine([5]), TOKENIZER, max_connections=8) as running, ExitStack() as stack:
        slow = [stack.enter_context(connect(running)) for _ in range(40)]
        for connection in slow:
            try:
                connection.sendall(opening.encode())
            except OSError:
                continue  # it has had to make room already
        for _ in range(3):
            assert httpx.post(f"{running.url}/v1/completions", json={"prompt": "k"}).status_code == 200
            assert len(running.server.server_state.connections) <= 8


def test_who_is_served_makes_no_room():
    engine = FakeEngine()
    with faked(engine, TOKENIZER, max_connections=2) as running, connect(running) as first, connect(running) as second:
        for connection in (first, second):
            connection.sendall(request(stream=True))
        handles = engine.wait_for(2)
        with connect(running) as third:
            status, headers, body = read(third)
            assert (status, headers["retry-after"], error_of(body)["code"]) == (503, "1", "too_many_connections")
            assert is_closed(third)
        finish(handles)
        assert all(b"[DONE]" in read(connection)[2] for connection in (first, second))


INVALID = {
    "no HTTP": b"hello\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 64,
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "a header without a name": b"GET /health HTTP/1.1\r\nHost: localhost\r\n: x\r\n\r\n",
    "a length of words": b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: many\r\n\r\n",
    "two lengths": b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
    "an endless header": b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 100_000,
    "a space too many": b"GET  /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "another coding": b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip\r\n\r\n",
}


@pytest.mark.parametrize("case", INVALID)
def test_what_is_no_http_is_told_so_in_the_same_form(served, case):
    with connect(served) as connection:
        connection.sendall(INVALID[case])
        status, headers, body = read(connection)
        assert (status, headers["content-type"]) == (400, "application/json")
        assert error_of(body)["type"] == "invalid_request_error"
        assert is_closed(connection)


def test_a_broken_body_is_told_so_too(served):
    head = request().partition(b"Content-Length")[0] + b"Transfer-Encoding: chunked\r\n\r\n"
    with connect(served) as connection:
        connection.sendall(head + b'5\r\n{"pro\r\nno length\r\n')
        status, _, body = read(connection)
        assert (status, error_of(body)["type"]) == (400, "invalid_request_error")
    assert served.service.limits.num_open == 0


ADDRESSES = {
    "nothing there": ("GET", "/nothing", 404, "'/nothing'"),
    "a slash too many": ("GET", "/v1/models/", 404, "no model ''"),
    "a slash after a post": ("POST", "/v1/chat/completions/", 404, "'/v1/chat/completions/'"),
    "a slash after health": ("GET", "/health/", 404, "'/health/'"),
    "another method": ("GET", "/v1/completions", 405, "GET is not allowed at '/v1/completions', but POST"),
    "a method of nobody": ("BREW", "/health", 405, "BREW"),
    "another file": ("GET", "/../../etc/passwd", 404, "etc"),
}


@pytest.mark.parametrize("case", ADDRESSES)
def test_an_address_or_method_that_is_not_there_is_told_and_never_redirected(served, case):
    method, path, status, words = ADDRESSES[case]
    with connect(served) as connection:
        connection.sendall(request(path, method).replace(b"Host: localhost", b"Host: 127.0.0.1:99"))
        got, headers, body = read(connection)
    assert (got, "location" in headers) == (status, False)
    assert words in error_of(body)["message"]


@pytest.mark.parametrize(
    "path", ["/health", "/ready", "/v1/models", "/v1/models/tiny", "/openapi.json", "/", "/nothing"]
)
def test_head_is_get_without_a_body(served, path):
    with connect(served) as connection:
        connection.sendall(request(path, "HEAD") + request("/health", "GET"))
        status, headers, body = read(connection, "HEAD")
        got = httpx.get(f"{served.url}{path}")
        assert (status, body) == (got.status_code, b"")
        assert (headers["content-length"], headers["content-type"]) == (
            got.headers["content-length"],
            got.headers["content-type"],
        )
        assert read(connection, "GET")[0] == 200  # the connection is where it should be
    assert httpx.head(f"{served.url}/v1/completions").status_code == 405
