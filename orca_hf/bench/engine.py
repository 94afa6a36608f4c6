"""`bench engine`: the time of one batch of equal rows, by Orca and natively (the paper's section 6.1, Figure 9).

There is no queue and nothing to schedule: all rows start and end together, so this is the engine alone.
"""

import random
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass

from orca_hf.bench import plot, report
from orca_hf.bench.metrics import Spread, spread
from orca_hf.bench.subject import Generate, Subject, ready
from orca_hf.bench.workload import ClientRequest, random_prompt


@dataclass(frozen=True, slots=True)
class Point:
    """One batch size of one engine.

    Attributes:
        engine: "orca" or "native".
        prompt_len: Tokens in, of each row.
        output_len: Tokens out, of each row.
        batch_size: Rows.
        seconds: Time of the batch.
        seconds_per_token: The same for each of a row's output tokens.
        tokens_per_second: Output tokens of all rows.
    """

    engine: str
    prompt_len: int
    output_len: int
    batch_size: int
    seconds: Spread
    seconds_per_token: Spread
    tokens_per_second: Spread


def measure(arguments: Namespace) -> list[Point]:
    """All batch sizes and prompt lengths, Orca and native by turns."""
    subject = Subject(arguments)
    rng = random.Random(arguments.seed)
    # Each call's engine is idle otherwise, so that all its rows run at once.
    engines: dict[str, Generate] = {"orca": subject.orca(max(arguments.batch_sizes)), "native": subject.native}
    cases = [(prompt_len, size) for prompt_len in arguments.prompt_lens for size in arguments.batch_sizes]
    times: dict[tuple[str, int, int], list[float]] = {}
    longest = ClientRequest(random_prompt(rng, max(arguments.prompt_lens), subject.vocab_size), arguments.output_len)
    call = subject.batch([longest])
    bar = report.progress(len(cases) * arguments.repeats, "batch")
    with bar, ready(engines["orca"], call), ready(engines["native"], call):
        for repeat in range(arguments.repeats):
            for prompt_len, size in cases:
                prompts = [random_prompt(rng, prompt_len, subject.vocab_size) for _ in range(size)]
                call = subject.batch([ClientRequest(prompt, arguments.output_len) for prompt in prompts])
                for name, generate in list(engines.items())[:: -1 if repeat % 2 else 1]:
                    start = time.perf_counter()
                    generate(**call)
                    times.setdefault((name, prompt_len, size), []).append(time.perf_counter() - start)
                bar.update()
    return [_point(*key, arguments.output_len, seconds) for key, seconds in times.items()]


def _point(engine: str, prompt_len: int, batch_size: int, output_len: int, seconds: Sequence[float]) -> Point:
    return Point(
        engine=engine,
        prompt_len=prompt_len,
        output_len=output_len,
        batch_size=batch_size,
        seconds=spread(seconds),
        seconds_per_token=spread(value / output_len for value in seconds),
        tokens_per_second=spread(batch_size * output_len / value for value in seconds),
    )


def table(points: Sequence[Point]) -> str:
    """The points as text."""
    headers = ("engine", "tokens in", "batch", "seconds", "ms/token", "tokens/s")
    return report.table(
        headers,
        [
            (p.engine, p.prompt_len, p.batch_size, p.seconds, p.seconds_per_token.scaled(1000), p.tokens_per_second)
            for p in sorted(points, key=lambda p: (p.prompt_len, p.batch_size, p.engine))
        ],
    )


def draw(path: str, points: Sequence[Point]) -> None:
    """Time of the batch, and throughput, against the batch size."""
    lines: dict[str, list[Point]] = {}
    for point in points:
        lines.setdefault(f"{point.engine}, {point.prompt_len} in", []).append(point)

    def panel(title: str, y_label: str, of: str) -> plot.Panel:
        drawn = [
            plot.Line(label, [p.batch_size for p in line], [getattr(p, of).median for p in line])
            for label, line in lines.items()
        ]
        return plot.Panel(title, "batch size (rows)", y_label, drawn, log_x=True)

    out = f"{points[0].output_len} tokens out"
    plot.draw_lines(
        path,
        [
            panel(f"Time of one batch, {out}", "time (s)", "seconds"),
            panel(f"Throughput, {out}", "output tokens/s", "tokens_per_second"),
        ],
    )


def passed(points: Sequence[Point]) -> bool:
    """Nothing here can be wrong, only slow."""
    return bool(points)
