"""`bench soak`: a server under requests of all kinds for a while. Nothing is to be wrong, and nothing to be left.

Each request is sent alone first. Then clients come at random times, send these requests and malformed ones, and some
leave before their answer or in the middle of it. Whatever is answered is to be what was answered alone.
"""

import asyncio
import random
import re
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orca_hf.bench import plot, report
from orca_hf.bench.live_server import LiveServer, server_of
from orca_hf.bench.soak_requests import proper
from orca_hf.errors import OrcaError

if TYPE_CHECKING:
    from orca_hf.bench.soak_clients import Clients

MEMORY_LIMIT = 1.05  # of the memory after the warm-up
_WARM_UP = 0.1  # requests of it, as a share of those that count
_SETTLING = 60  # seconds for what clients have left behind


@dataclass(frozen=True, slots=True)
class Point:
    """One soak.

    Attributes:
        requests: Sent, the warm-up's not counted.
        answered: Whose whole answer was the one that they got alone.
        left: Whose client went away before.
        malformed: Wrong ones that were refused as they should be.
        busy: Refused with a 429.
        broken: With a wrong answer, or none.
        faults: The first few of these, in words.
        server_errors: Responses of 500 and above, of all.
        failed: Answers that failed in the engine.
        open: Answers that the server still has at the end.
        reserved: K/V slots reserved at the end.
        seconds: From the first request to the end of the last.
        warm_mib: The server's memory after the warm-up, in MiB.
        end_mib: The same at the end.
    """

    requests: int
    answered: int
    left: int
    malformed: int
    busy: int
    broken: int
    faults: tuple[str, ...]
    server_errors: int
    failed: int
    open: int
    reserved: int
    seconds: float
    warm_mib: float
    end_mib: float


def measure(arguments: Namespace) -> list[Point]:
    """One soak.

    Raises:
        OrcaError: The server does not come up, or httpx is not installed.
    """
    try:
        from orca_hf.bench.soak_clients import Clients
    except ImportError as error:
        raise OrcaError(f"{error.name} is missing, which a soak needs: pip install 'orca-hf[bench]'.") from error
    flags = ["--max-num-seqs", str(arguments.max_batch_size), "--max-slots", str(arguments.max_slots)]
    with server_of(arguments, flags) as server:
        return [asyncio.run(_soak(server, arguments, Clients))]


async def _soak(server: LiveServer, arguments: Namespace, make_clients: "type[Clients]") -> Point:
    rng = random.Random(arguments.seed)
    requests = [proper(rng) for _ in range(arguments.distinct)]
    num_warm = round(_WARM_UP * arguments.requests)
    with report.progress(len(requests) + num_warm + arguments.requests, "request") as bar:
        clients = make_clients(server.url, rng)
        work = list(zip(requests, await clients.alone(requests, bar.update), strict=True))
        await clients.arrive(work, num_warm, arguments.rate, bar.update)
        await _settled(server)
        warm = server.resident_bytes()
        warm_up, clients = clients, make_clients(server.url, rng)
        start = time.perf_counter()
        await clients.arrive(work, arguments.requests, arguments.rate, bar.update)
        seconds = time.perf_counter() - start
    at_end = await _settled(server)
    found, broken = clients.outcomes, [*warm_up.broken, *clients.broken]
    return Point(
        requests=arguments.requests,
        answered=found["answered"],
        left=found["left"],
        malformed=found["malformed"],
        busy=found["busy"],
        broken=len(broken),
        faults=tuple(broken[:5]),
        server_errors=_server_errors(server.get("/metrics")),
        failed=at_end["num_failed"],
        open=at_end["open"] + at_end["num_running"] + at_end["num_waiting"],
        reserved=at_end["num_reserved"],
        seconds=seconds,
        warm_mib=warm / 2**20,
        end_mib=server.resident_bytes() / 2**20,
    )


async def _settled(server: LiveServer) -> dict[str, int]:
    """The server's status once nothing runs, or when that has taken too long."""
    limit = time.monotonic() + _SETTLING
    while True:
        status = server.status()
        if not (status["num_running"] or status["num_waiting"] or status["open"]) or time.monotonic() > limit:
            return status
        await asyncio.sleep(0.1)


def _server_errors(metrics: str) -> int:
    counted = re.findall(r'^orca_http_responses_total\{.*status="5\d\d".*\} (\S+)$', metrics, re.MULTILINE)
    return sum(int(float(count)) for count in counted)


def table(points: Sequence[Point]) -> str:
    """The points as text."""
    (point,) = points
    numbers = {name: getattr(point, name) for name in Point.__slots__ if name != "faults"}
    rows = [(name, f"{value:.1f}" if isinstance(value, float) else value) for name, value in numbers.items()]
    return "\n".join([report.table(("soak", ""), rows), *point.faults])


def draw(path: str, points: Sequence[Point]) -> None:
    """How requests ended."""
    (point,) = points
    counts = {name: getattr(point, name) for name in ("answered", "left", "malformed", "busy", "broken")}
    plot.draw_bars(path, list(counts), [(count, count, count) for count in counts.values()], "requests", None)


def passed(points: Sequence[Point]) -> bool:
    """Whether nothing was wrong and nothing is left."""
    return all(
        not (point.broken or point.server_errors or point.failed or point.open or point.reserved)
        and point.answered + point.left + point.malformed + point.busy == point.requests
        and point.end_mib <= MEMORY_LIMIT * point.warm_mib
        for point in points
    )
