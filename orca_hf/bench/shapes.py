"""`bench shapes`: kinds of work, most of which batching does nothing for. Orca may be slower than native on none.

short-1, short-8, short-64 are one short prompt with as many tokens out; tiny-calls are 32 calls one after the other.
"""

import random
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from orca_hf.bench import plot, report
from orca_hf.bench.metrics import Spread, spread
from orca_hf.bench.subject import Generate, Subject, ready
from orca_hf.bench.workload import ClientRequest, random_prompt
from orca_hf.errors import OrcaError

# Below this Orca counts as slower; nearer to 1, clocks decide.
LIMIT = 0.97
_SHORT = 16


@dataclass(frozen=True, slots=True)
class Point:
    """One shape.

    Attributes:
        shape: Its name.
        orca_seconds: Orca's time.
        native_seconds: Native generate()'s.
        speed: Native's time over Orca's, of the pairs run one after the other; above 1, Orca is faster.
        slower: Whether the median of `speed` is below 0.97.
    """

    shape: str
    orca_seconds: Spread
    native_seconds: Spread
    speed: Spread
    slower: bool


class _Discard:
    """A streamer that looks at no token."""

    def put(self, value: Tensor) -> None:
        pass

    def end(self) -> None:
        pass


def shapes(subject: Subject, long_prompt: int, seed: int) -> dict[str, list[dict[str, Any]]]:
    """The arguments of the calls of each shape, made one after the other."""
    rng = random.Random(seed)

    def call(*lengths: int, out: int, **options: Any) -> dict[str, Any]:
        rows = [ClientRequest(random_prompt(rng, length, subject.vocab_size), out) for length in lengths]
        return {**subject.batch(rows), **options}

    ended = call(_SHORT, out=64)
    first = int(subject.native(**{**ended, "max_new_tokens": 1})[0, -1])
    return {
        "short-1": [call(_SHORT, out=1)],
        "short-8": [call(_SHORT, out=8)],
        "short-64": [call(_SHORT, out=64)],
        "long-8": [call(long_prompt, out=8)],
        "equal-rows": [call(*[_SHORT] * 8, out=32)],
        "long-among-short": [call(long_prompt, *[_SHORT] * 7, out=16)],
        "ragged-rows": [call(*(max(long_prompt * i // 16, 1) for i in range(1, 9)), out=32)],
        "immediate-eos": [{**ended, "eos_token_id": first}],
        "tiny-calls": [call(4, out=2) for _ in range(32)],
        "sampled-rows": [call(*[_SHORT] * 4, out=32, do_sample=True, top_k=50, top_p=0.9)],
        "streamer": [call(_SHORT, out=32, streamer=_Discard())],
    }


def measure(arguments: Namespace) -> list[Point]:
    """Each shape by Orca and natively by turns, the first one changing each time."""
    subject = Subject(arguments)
    work = shapes(subject, arguments.long_prompt, arguments.seed)
    if unknown := set(arguments.only) - set(work):
        raise OrcaError(f"There is no shape {', '.join(sorted(unknown))}; there are: {'; '.join(work)}.")
    chosen = {name: calls for name, calls in work.items() if not arguments.only or name in arguments.only}
    orca = subject.orca()
    points = []
    orca_times: list[float]
    native_times: list[float]
    with report.progress(len(chosen) * arguments.repeats, "shape") as bar, ready(orca, work["short-8"][0]):
        for name, calls in chosen.items():
            orca_times, native_times = [], []
            for generate in (orca, subject.native):
                _time(generate, calls, arguments.seed)  # the first time of a size, memory is fetched
            for repeat in range(arguments.repeats):
                for generate in (orca, subject.native)[:: 1 if repeat % 2 else -1]:
                    times = orca_times if generate is orca else native_times
                    times.append(_time(generate, calls, arguments.seed))
                bar.update()
            points.append(_point(name, orca_times, native_times))
    return points


def _time(generate: Generate, calls: Sequence[dict[str, Any]], seed: int) -> float:
    torch.manual_seed(seed)
    start = time.perf_counter()
    for call in calls:
        generate(**call)
    return time.perf_counter() - start


def _point(name: str, orca: Sequence[float], native: Sequence[float]) -> Point:
    speed = spread(theirs / ours for ours, theirs in zip(orca, native, strict=True))
    return Point(name, spread(orca), spread(native), speed, slower=speed.median < LIMIT)


def table(points: Sequence[Point]) -> str:
    """The points as text."""
    rows = [(p.shape, p.orca_seconds, p.native_seconds, p.speed, "SLOWER" if p.slower else "") for p in points]
    return report.table(("shape", "orca s", "native s", "native/orca", ""), rows)


def draw(path: str, points: Sequence[Point]) -> None:
    """A bar for each shape."""
    speeds = [(p.speed.median, p.speed.low, p.speed.high) for p in points]
    plot.draw_bars(path, [p.shape for p in points], speeds, "native time / Orca time (above 1: Orca is faster)", 1.0)


def passed(points: Sequence[Point]) -> bool:
    """Slower is for a reader to judge: one busy neighbour makes it so."""
    return bool(points)
