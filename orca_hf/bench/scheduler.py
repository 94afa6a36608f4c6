"""`bench scheduler`: what one iteration costs in the scheduler alone, with many running and very many waiting.

An iteration is schedule, complete, and append or finish for every request in it, as the engine does them. Whoever
ends is replaced at the end of the queue, outside the time. Wall time has other processes in it, CPU time has not.
"""

import random
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass

from orca_hf.bench import plot, report
from orca_hf.bench.metrics import percentile
from orca_hf.kv_manager import KVManager
from orca_hf.request import Request
from orca_hf.scheduler import Scheduler

_BLOCK_SIZE = 16
_MAX_PROMPT, _MAX_OUTPUT = 128, 128
_TOKEN = 7  # the scheduler never looks at it


@dataclass(frozen=True, slots=True)
class Point:
    """All iterations, in milliseconds.

    Attributes:
        running: Most requests in an iteration.
        waiting: Requests in the queue.
        iterations: Iterations measured.
        clock: "wall" or "cpu".
        median_ms: Half the iterations took no longer.
        p99_ms: 99 of 100 took no longer.
        max_ms: The longest.
        percentiles_ms: Percentiles 0 to 100.
    """

    running: int
    waiting: int
    iterations: int
    clock: str
    median_ms: float
    p99_ms: float
    max_ms: float
    percentiles_ms: list[float]


def measure(arguments: Namespace) -> list[Point]:
    """Runs the scheduler from a full queue, and measures once it is in a steady state."""
    rng = random.Random(arguments.seed)
    scheduler = Scheduler(
        KVManager(arguments.running * (_MAX_PROMPT + _MAX_OUTPUT), _BLOCK_SIZE),
        max_batch_size=arguments.running,
        max_batch_tokens=2 * arguments.running,
    )
    for _ in range(arguments.waiting):
        scheduler.submit(_request(rng))
    wall, cpu = [], []
    warm_up = _MAX_OUTPUT
    with report.progress(arguments.iterations, "iteration") as bar:
        for index in range(warm_up + arguments.iterations):
            wall_start, cpu_start = time.perf_counter(), time.thread_time()
            num_ended = _iterate(scheduler)
            wall_end, cpu_end = time.perf_counter(), time.thread_time()
            for _ in range(num_ended):
                scheduler.submit(_request(rng))
            if index >= warm_up:
                wall.append(1000 * (wall_end - wall_start))
                cpu.append(1000 * (cpu_end - cpu_start))
                bar.update()
    return [_point(arguments, "wall", wall), _point(arguments, "cpu", cpu)]


def _request(rng: random.Random) -> Request:
    return Request(range(rng.randint(1, _MAX_PROMPT)), rng.randint(1, _MAX_OUTPUT))


def _iterate(scheduler: Scheduler) -> int:
    """One iteration; returns how many requests ended."""
    iteration = scheduler.schedule()
    assert iteration is not None
    scheduler.complete(iteration)
    num_ended = 0
    for step in iteration.steps:
        if step.samples:
            request = step.request
            scheduler.append(request, (_TOKEN,))
            if len(request.generated) == request.max_new_tokens:
                scheduler.finish(request)
                num_ended += 1
    return num_ended


def _point(arguments: Namespace, clock: str, times: Sequence[float]) -> Point:
    return Point(
        running=arguments.running,
        waiting=arguments.waiting,
        iterations=len(times),
        clock=clock,
        median_ms=percentile(times, 50),
        p99_ms=percentile(times, 99),
        max_ms=max(times),
        percentiles_ms=[percentile(times, percent) for percent in range(101)],
    )


def table(points: Sequence[Point]) -> str:
    """The points as text."""
    headers = ("clock", "running", "waiting", "iterations", "median ms", "p99 ms", "max ms")
    return report.table(
        headers,
        [
            (p.clock, p.running, p.waiting, p.iterations, *(f"{v:.3f}" for v in (p.median_ms, p.p99_ms, p.max_ms)))
            for p in points
        ],
    )


def draw(path: str, points: Sequence[Point]) -> None:
    """The share of iterations that took no longer, by clock; up to 99 %, since the longest would hide the others."""
    shares = range(0, 100, 3)
    lines = [plot.Line(f"{p.clock} time", [p.percentiles_ms[share] for share in shares], shares) for p in points]
    title = f"Scheduler, {points[0].running} running, {points[0].waiting} waiting"
    plot.draw_lines(path, [plot.Panel(title, "time of an iteration (ms)", "iterations (%)", lines)])


def passed(points: Sequence[Point]) -> bool:
    """Nothing here can be wrong, only slow."""
    return bool(points)
