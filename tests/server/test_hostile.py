"""Promise: no body, however it is made, holds the event loop up; it is refused with a sentence, or answered."""

import asyncio
import socket
import threading
import time
from contextlib import contextmanager

import httpx
import pytest
from live import PATIENCE, FakeEngine, live
from tiny import make_model
from tokenizers_tiny import byte_level

from orca_hf.bench.hostile_bodies import hostile, names
from orca_hf.server import service

TOKENIZER = byte_level()
SIZE = 4 * 2**20  # the server's own limit
# Seconds; a generous bound on a busy machine. It was 14 for messages that are numbers, 101 for negative tokens.
MAX_LAG = 1.0


@pytest.fixture(scope="module")
def served():
    engine, model = FakeEngine([5]), make_model()
    model.generation_config.eos_token_id = TOKENIZER.eos_token_id
    with live(engine, model, TOKENIZER, max_model_len=2048) as running:
        assert httpx.get(f"{running.url}/health").status_code == 200  # its event loop runs
        yield running, engine.loop


@contextmanager
def lag_counted(loop):
    """The longest time between two turns of a server's event loop, in a list, when the block is over."""
    longest, over = [0.0], threading.Event()

    async def tick():
        last = time.perf_counter()
        while not over.is_set():
            await asyncio.sleep(0)
            now = time.perf_counter()
            longest[0] = max(longest[0], now - last)
            last = now
            await asyncio.sleep(0.001)
            longest[0] = max(longest[0], time.perf_counter() - last - 0.001)
            last = time.perf_counter()

    ticking = asyncio.run_coroutine_threadsafe(tick(), loop)
    try:
        yield longest
    finally:
        over.set()
        ticking.result(PATIENCE)


@pytest.fixture(scope="module")
def judged(served):
    """By path and name: what was sent, its answer, the lag, and the threads that judged the body."""
    running, loop = served
    found, threads = {}, []
    read = service.parse

    def noting(*args):
        threads.append(threading.current_thread().name)
        return read(*args)

    service.parse = noting
    try:
        for each in hostile(SIZE):
            threads.clear()
            with lag_counted(loop) as lag:
                headers = {"Content-Type": "application/json"}
                answer = httpx.post(running.url + each.path, content=each.body, headers=headers, timeout=PATIENCE)
            found[each.path, each.name] = each, answer, lag[0], list(threads)
    finally:
        service.parse = read
    return found


@pytest.mark.parametrize("place", names(), ids=" ".join)
def test_it_is_judged_beside_the_event_loop(judged, place):
    sent, answer, lag, threads = judged[place]
    assert answer.status_code == sent.status, answer.text[:500]
    if sent.status == 400:
        assert len(answer.json()["error"]["message"]) < 1000
    assert len(sent.body) <= SIZE
    assert len(threads) == 1
    if len(sent.body) > 2**15:  # others, of schemas, are long in the compiling
        assert threads[0].startswith("orca-prepare-long")
    assert lag < MAX_LAG


def test_small_pieces_are_sent_at_once(served):
    """Otherwise each waits until the client has told that it has the last one: 40 ms of every answer."""
    running, _ = served
    with httpx.Client(base_url=running.url) as client:
        assert client.get("/health").status_code == 200
        (connection, *_) = running.server.server_state.connections
        connected = connection.transport.get_extra_info("socket")
        assert connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
