"""`bench hostile`: a server under bodies that are long to judge. Others are to notice nothing of them.

One client reads streams, one asks for /health again and again, and a third sends the bodies, one after the other.
"""

import asyncio
import time
from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

from orca_hf.bench import plot, report
from orca_hf.bench.hostile_bodies import Hostile, hostile, names
from orca_hf.bench.live_server import LiveServer, server_of
from orca_hf.errors import OrcaError

HEALTH_LIMIT, PAUSE_LIMIT = 0.1, 0.25  # seconds: the median of /health, and the longest pause of a stream
_PATIENCE = 300  # seconds after which an answer counts as one that never comes
_SHORTEST = 0.5  # seconds for which each is looked at
_STREAMED = {"prompt": "k", "max_tokens": 256, "ignore_eos": True, "stream": True}


@dataclass(frozen=True, slots=True)
class Point:
    """What one body does.

    Attributes:
        path: Where it was sent.
        name: What it is full of.
        mebibytes: Its size.
        status: Of its answer.
        expected: What that should be.
        seconds: Until its answer.
        health: The median time of /health meanwhile, in seconds.
        pause: The longest time between two pieces of a stream meanwhile.
    """

    path: str
    name: str
    mebibytes: float
    status: int
    expected: int
    seconds: float
    health: float
    pause: float


@dataclass(slots=True)
class _Bystanders:
    """What two other clients see: the times of /health, and the pauses of streams."""

    healths: list[float] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)

    async def ask(self, client: Any) -> None:
        """Asks for /health, again and again."""
        while True:
            start = time.perf_counter()
            (await client.get("/health")).raise_for_status()
            self.healths.append(time.perf_counter() - start)
            await asyncio.sleep(0.005)

    async def read(self, client: Any) -> None:
        """Reads streams, one after the other."""
        while True:
            async with client.stream("POST", "/v1/completions", json=_STREAMED) as stream:
                stream.raise_for_status()
                last = None
                async for _ in stream.aiter_raw():
                    now = time.perf_counter()
                    if last is not None:
                        self.pauses.append(now - last)
                    last = now


def measure(arguments: Namespace) -> list[Point]:
    """Sends all bodies.

    Raises:
        OrcaError: The server does not come up, or httpx is not installed.
    """
    try:
        import httpx
    except ImportError as error:
        raise OrcaError(f"{error.name} is missing, which this bench needs: pip install 'orca-hf[bench]'.") from error
    with server_of(arguments, ["--max-body-bytes", str(arguments.body_bytes)]) as server:
        return asyncio.run(_measure(server, arguments, partial(httpx.AsyncClient, timeout=_PATIENCE)))


async def _measure(server: LiveServer, arguments: Namespace, connect: Any) -> list[Point]:
    points = []
    with report.progress(len(names()) + 1, "body") as bar:
        async with (
            connect(base_url=server.url) as asking,
            connect(base_url=server.url) as reading,
            connect(base_url=server.url) as sending,
        ):
            nothing = Hostile("nothing", "/health", 200, b"")
            for each in (nothing, *hostile(arguments.body_bytes)):
                seen = _Bystanders()
                watching = [asyncio.create_task(seen.ask(asking)), asyncio.create_task(seen.read(reading))]
                await asyncio.sleep(_SHORTEST / 2)
                start = time.perf_counter()
                status = await _send(sending, each)
                seconds = time.perf_counter() - start
                await asyncio.sleep(_SHORTEST / 2)
                for task in watching:
                    task.cancel()
                    with suppress(asyncio.CancelledError):
                        await task
                points.append(
                    Point(
                        path=each.path,
                        name=each.name,
                        mebibytes=len(each.body) / 2**20,
                        status=status,
                        expected=each.status,
                        seconds=seconds,
                        health=median(seen.healths),
                        pause=max(seen.pauses),
                    )
                )
                bar.update()
    return points


async def _send(client: Any, each: Hostile) -> int:
    if not each.body:
        return int((await client.get(each.path)).status_code)
    headers = {"Content-Type": "application/json"}
    return int((await client.post(each.path, content=each.body, headers=headers)).status_code)


def table(points: Sequence[Point]) -> str:
    """The points as text."""
    headers = ("body", "MiB", "status", "seconds", "/health ms", "longest pause ms")
    rows = [
        (
            f"{point.path} {point.name}",
            f"{point.mebibytes:.1f}",
            point.status,
            f"{point.seconds:.2f}",
            f"{1000 * point.health:.0f}",
            f"{1000 * point.pause:.0f}",
        )
        for point in points
    ]
    return report.table(headers, rows)


def draw(path: str, points: Sequence[Point]) -> None:
    """The longest pauses."""
    pauses = [1000 * point.pause for point in points]
    plot.draw_bars(path, [point.name for point in points], [(each,) * 3 for each in pauses], "longest pause, ms", None)


def passed(points: Sequence[Point]) -> bool:
    """Whether each was answered as it should be, and nobody else had to wait."""
    return all(
        point.status == point.expected and point.health <= HEALTH_LIMIT and point.pause <= PAUSE_LIMIT
        for point in points
    )
