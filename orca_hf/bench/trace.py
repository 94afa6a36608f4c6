"""`bench trace`: requests that arrive by a clock, at swept rates (the paper's section 6.2, Figures 10 and 11).

Systems: "orca", "request" (the same engine with request-level scheduling, prompts whole as in the paper) and "native"
(a queue in front of generate(), as many at once as max_batch_size says). All get the same requests at the same times.
"""

import math
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from orca_hf.bench import plot, report, workload
from orca_hf.bench.metrics import Spread, goodput, spread, summary
from orca_hf.bench.request_level import RequestLevelGenerate
from orca_hf.bench.serving import NativeServer, OrcaServer, open_loop
from orca_hf.bench.subject import Generate, Subject, ready
from orca_hf.bench.workload import ClientRequest


@dataclass(frozen=True, slots=True)
class Point:
    """One system at one rate. Times in seconds; every request counts, those of the beginning and end too.

    Attributes:
        system: "orca", "request" or "native".
        max_batch_size: Most requests at once.
        rate: Requests a second that arrive; of a trace, its mean.
        requests: How many there were.
        throughput: Requests a second, from the first arrival to the last answer.
        latency_median: Median of end-to-end seconds an output token, as Orca reports it.
        latency_mean: Its mean, as vLLM does.
        ttft_median: Time to the first token, queueing included.
        ttft_p99: Its 99th percentile.
        tpot_median: Seconds a token after the first, to the end of the answer.
        gap_p99: 99th percentile of the seconds between a token and the next, over all tokens.
        within_limits: Share of requests inside --ttft-limit and --tpot-limit.
        slots_reserved: Mean of n_rsrv / n_slots; None natively.
        slots_used: Mean share of the reserved slots that hold a token; None natively.
    """

    system: str
    max_batch_size: int
    rate: float
    requests: int
    throughput: Spread
    latency_median: Spread
    latency_mean: Spread
    ttft_median: Spread
    ttft_p99: Spread
    tpot_median: Spread
    gap_p99: Spread
    within_limits: Spread
    slots_reserved: Spread | None
    slots_used: Spread | None


def measure(arguments: Namespace) -> list[Point]:
    """Every system at every rate, one after the other, and all again for each repeat."""
    subject = Subject(arguments)
    systems = [(name, size) for name in arguments.scheduler for size in arguments.max_batch_size]
    loads = _loads(arguments, subject.vocab_size)
    found: dict[tuple[str, int, float], list[dict[str, float]]] = {}
    total = len(systems) * arguments.repeats * sum(len(requests) for _, requests in loads)
    with report.progress(total, "request") as bar:
        for _ in range(arguments.repeats):
            for rate, requests in loads:
                for name, size in systems:
                    bar.set_postfix_str(f"{name}, batch {size}, {rate:.3g} requests/s")
                    figures = _run(subject, name, size, requests, arguments, bar.update)
                    found.setdefault((name, size, rate), []).append(figures)
    return [_point(*key, arguments.requests, runs) for key, runs in found.items()]


def _loads(arguments: Namespace, vocab_size: int) -> list[tuple[float, list[ClientRequest]]]:
    """(rate, requests) of each load."""
    common = {"vocab_size": vocab_size, "scale": arguments.scale, "seed": arguments.seed}
    if arguments.trace is None:
        lengths = {"prompt": arguments.prompt, "output": arguments.output}
        return [
            (rate, workload.synthetic(arguments.requests, rate=rate, **lengths, **common)) for rate in arguments.rates
        ]
    traces = [
        workload.azure(arguments.trace, arguments.requests, speed=speed, max_total=arguments.max_total, **common)
        for speed in arguments.speed
    ]
    return [(len(trace) / trace[-1].arrival if trace[-1].arrival else math.inf, trace) for trace in traces]


def _run(
    subject: Subject,
    name: str,
    max_batch_size: int,
    requests: Sequence[ClientRequest],
    arguments: Namespace,
    served: Callable[[], object],
) -> dict[str, float]:
    generate: Generate = subject.native
    if name == "orca":
        generate = subject.orca(max_batch_size)
    elif name == "request":
        # Chunks would keep part of a batch from starting with it.
        generate = subject.orca(max_batch_size, RequestLevelGenerate, whole_prompts=True)
    longest = max(requests, key=lambda request: len(request.prompt) + request.num_outputs)
    with ready(generate, subject.batch([longest])):
        if name == "native":
            server: NativeServer | OrcaServer = NativeServer(subject, generate, max_batch_size)
        else:
            server = OrcaServer(subject, generate)  # type: ignore[arg-type]
        with server as serve:
            timelines = open_loop(requests, serve, served)
        figures = summary(timelines, arguments.ttft_limit, arguments.tpot_limit)
        if isinstance(server, OrcaServer):
            figures |= {"slots_reserved": server.slots.reserved, "slots_used": server.slots.used}
    return figures


def _point(system: str, max_batch_size: int, rate: float, requests: int, runs: Sequence[dict[str, float]]) -> Point:
    figures: dict[str, Spread | None] = {"slots_reserved": None, "slots_used": None}
    figures |= {name: spread(run[name] for run in runs) for name in runs[0]}
    return Point(system, max_batch_size, rate, requests, **figures)  # type: ignore[arg-type]


def table(points: Sequence[Point]) -> str:
    """The points as text, with the goodput of each system."""
    columns = {
        "requests/s": "throughput",
        "s/token, median": "latency_median",
        "mean": "latency_mean",
        "TTFT, median": "ttft_median",
        "p99": "ttft_p99",
        "TPOT": "tpot_median",
        "gap p99": "gap_p99",
        "in limits": "within_limits",
        "reserved": "slots_reserved",
        "of it used": "slots_used",
    }
    lines = by_system(points)
    rows = [
        (label, f"{p.rate:.3g}", *(getattr(p, column) or "-" for column in columns.values()))
        for label, line in lines.items()
        for p in line
    ]
    best = [(label, f"{goodput((p.rate, p.within_limits.median) for p in line):.3g}") for label, line in lines.items()]
    return "\n\n".join(
        [
            report.table(("system, batch", "rate", *columns), rows),
            "Goodput: the highest rate at which nine of ten requests are inside both limits.",
            report.table(("system, batch", "requests/s"), best),
        ]
    )


def by_system(points: Sequence[Point]) -> dict[str, list[Point]]:
    """The points of each system and batch size."""
    lines: dict[str, list[Point]] = {}
    for point in points:
        lines.setdefault(f"{point.system}, {point.max_batch_size}", []).append(point)
    return lines


def draw(path: str, points: Sequence[Point]) -> None:
    """The paper's Figure 10, with the median and with the mean, and the times to the first token."""

    def panel(title: str, y_label: str, of: str) -> plot.Panel:
        lines = [
            plot.Line(label, [p.throughput.median for p in line], [getattr(p, of).median for p in line])
            for label, line in by_system(points).items()
        ]
        return plot.Panel(title, "throughput (requests/s)", y_label, lines, log_y=True)

    plot.draw_lines(
        path,
        [
            panel("Normalised latency, median", "median latency (s/token)", "latency_median"),
            panel("Normalised latency, mean", "mean latency (s/token)", "latency_mean"),
            panel("Time to the first token", "median time (s)", "ttft_median"),
        ],
    )


def passed(points: Sequence[Point]) -> bool:
    """Nothing here can be wrong, only slow."""
    return bool(points)
