"""`bench clients`: clients that stream over HTTP, all at once, and the same requests through the Python API.

Each way has a process of its own, the other one idle: the server has one, and the clients are with the Python API in
this one. What clients and server do to a stream's text costs processor time that the model could have had.
"""

import asyncio
import json
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from orca_hf.bench import plot, report
from orca_hf.bench.live_server import live_server
from orca_hf.bench.metrics import Spread, spread
from orca_hf.bench.subject import Subject
from orca_hf.bench.workload import ClientRequest, synthetic
from orca_hf.errors import OrcaError
from orca_hf.serving import ServingEngine


@dataclass(frozen=True, slots=True)
class Point:
    """One way.

    Attributes:
        way: "python" or "http".
        clients: Requests at once.
        seconds: From the first request to the last token.
        tokens_per_second: Of all answers together.
        share: Of Python's throughput, of runs one after the other.
    """

    way: str
    clients: int
    seconds: Spread
    tokens_per_second: Spread
    share: Spread


def measure(arguments: Namespace) -> list[Point]:
    """Both ways by turns, the first one changing each time, after a run of each that does not count."""
    subject = Subject(arguments)
    requests = synthetic(
        arguments.clients,
        prompt=arguments.prompt,
        output=arguments.output,
        rate=float("inf"),
        vocab_size=subject.vocab_size,
        seed=arguments.seed,
    )
    times: dict[str, list[float]] = {"python": [], "http": []}
    with (
        report.progress(2 * (1 + arguments.repeats), "run") as bar,
        live_server(subject.source, _flags(arguments), arguments.threads) as server,
        ServingEngine(subject.orca(arguments.max_batch_size)).serving() as engine,
    ):
        ways = {"python": lambda: _by_python(engine, requests), "http": lambda: _by_http(server.address, requests)}
        for repeat in range(1 + arguments.repeats):
            for way in list(ways)[:: 1 if repeat % 2 else -1]:
                start = time.perf_counter()
                ways[way]()
                times[way].append(time.perf_counter() - start)
                bar.update()
    num_tokens = sum(request.num_outputs for request in requests)
    return [_point(way, len(requests), num_tokens, times[way][1:], times["python"][1:]) for way in times]


def _flags(arguments: Namespace) -> list[str]:
    flags = ["--dtype", arguments.dtype, "--max-num-seqs", str(arguments.max_batch_size)]
    flags += ["--max-num-batched-tokens", str(max(arguments.max_batch_tokens, arguments.max_batch_size))]
    return flags + (["--max-slots", str(arguments.max_slots)] if arguments.max_slots else [])


def _by_python(engine: ServingEngine, requests: Sequence[ClientRequest]) -> None:
    handles = [
        engine.submit(list(request.prompt), max_new_tokens=request.num_outputs, do_sample=False) for request in requests
    ]
    for handle in handles:
        handle.result()


def _by_http(address: tuple[str, int], requests: Sequence[ClientRequest]) -> None:
    async def all_of_them() -> list[int]:
        return await asyncio.gather(*(_stream(address, request) for request in requests))

    if asyncio.run(all_of_them()) != [request.num_outputs for request in requests]:
        raise OrcaError("The server has not answered every request with as many tokens as were asked for.")


async def _stream(address: tuple[str, int], request: ClientRequest) -> int:
    """Reads one stream to its end; how many tokens it had.

    Looked at when it is over: a client library would take more time for an event than the server, on the same cores.
    """
    body = json.dumps({
        "prompt": list(request.prompt), "max_tokens": request.num_outputs, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }).encode()  # fmt: skip
    reader, writer = await asyncio.open_connection(*address)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {address[0]}\r\nConnection: close\r\n"
    writer.write(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    lines = (await reader.read()).splitlines()
    writer.close()
    events = [line.removeprefix(b"data: ") for line in lines if line.startswith(b"data: ")]
    if not events or events[-1] != b"[DONE]":
        raise OrcaError(f"The server has not answered to the end of a stream, but {b' '.join(lines[:1]).decode()!r}.")
    usage: dict[str, Any] = json.loads(events[-2])["usage"]
    return int(usage["completion_tokens"])


def _point(way: str, clients: int, num_tokens: int, times: Sequence[float], pythons: Sequence[float]) -> Point:
    share = spread(python / own for own, python in zip(times, pythons, strict=True))
    return Point(way, clients, spread(times), spread(num_tokens / seconds for seconds in times), share)


def table(points: Sequence[Point]) -> str:
    """The points as text."""
    rows = [(p.way, p.clients, p.seconds, p.tokens_per_second, p.share) for p in points]
    return report.table(("way", "clients", "seconds", "tokens/s", "of python's"), rows)


def draw(path: str, points: Sequence[Point]) -> None:
    """A bar for each way."""
    speeds = [(p.tokens_per_second.median, p.tokens_per_second.low, p.tokens_per_second.high) for p in points]
    plot.draw_bars(path, [p.way for p in points], speeds, "tokens/s", None)


def passed(points: Sequence[Point]) -> bool:
    """Slower is for a reader to judge."""
    return bool(points)
