"""`bench replay`: a request file by Orca, natively and by other engines, with their tokens compared.

Orca gets all requests at once, each from a thread of its own. A peer is a script that takes --model, --requests and
--out (and --threads, where the bench was given it), writes the tokens of each request there as a list of lists, and
prints {"peer": name, "seconds": float, ...} as one line; it measures itself, without its start.
"""

import json
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from orca_hf.bench import plot, report
from orca_hf.bench.metrics import Spread, spread
from orca_hf.bench.subject import Generate, Subject, new_tokens, ready
from orca_hf.bench.workload import ClientRequest, read_file
from orca_hf.errors import OrcaError

Tokens = list[list[int]]
# One run: its seconds and its tokens.
Run = Callable[[], tuple[float, Tokens]]
_ORCA, _BATCH, _SINGLES = "orca", "native, one batch", "native, one at a time"


@dataclass(frozen=True, slots=True)
class Point:
    """One engine.

    Attributes:
        engine: "orca", "native, one batch", "native, one at a time", or a peer's name.
        output_tokens: Of all requests.
        seconds: From the first request to the last answer; None if it failed.
        tokens_per_second: Output tokens; None if it failed.
        orca_speed: Its seconds over Orca's of the same repeat: above 1, Orca is faster; None if it failed.
        equal_rows: Requests whose tokens are those of native generate(), one at a time, in every repeat.
        rows: Requests.
        error: Why a peer failed; None if it did not.
    """

    engine: str
    output_tokens: int
    seconds: Spread | None
    tokens_per_second: Spread | None
    orca_speed: Spread | None
    equal_rows: int
    rows: int
    error: str | None = None


class PeerError(OrcaError):
    """A peer's script failed, or printed no result."""


def measure(arguments: Namespace) -> list[Point]:
    """Every engine in turn, and all again for each repeat."""
    requests = read_file(arguments.requests)
    scripts = _scripts(arguments)
    subject = Subject(arguments)
    orca = subject.orca()
    runs: dict[str, Run] = {
        _ORCA: partial(_orca, subject, orca, requests),
        _BATCH: partial(_native, subject, [requests]),
        _SINGLES: partial(_native, subject, [[request] for request in requests]),
        **{name: partial(_peer, name, script, subject.source, arguments) for name, script in scripts.items()},
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    tokens: dict[str, list[Tokens]] = {name: [] for name in runs}
    errors: dict[str, str] = {}
    longest = max(requests, key=lambda request: len(request.prompt) + request.num_outputs)
    call = subject.batch([longest])
    with report.progress(arguments.repeats * len(runs), "run") as bar, ready(orca, call), ready(subject.native, call):
        for _ in range(arguments.repeats):
            for name, run in runs.items():
                bar.set_postfix_str(name)
                if name not in errors:
                    try:
                        seconds, output = run()
                    except PeerError as error:
                        errors[name] = str(error)
                    else:
                        times[name].append(seconds)
                        tokens[name].append(output)
                bar.update()
    reference = tokens[_SINGLES][0]
    return [
        _point(name, requests, times[name], times[_ORCA], tokens[name], reference, errors.get(name)) for name in runs
    ]


def _orca(subject: Subject, generate: Generate, requests: Sequence[ClientRequest]) -> tuple[float, Tokens]:
    calls = [subject.batch([request]) for request in requests]
    start = time.perf_counter()
    with ThreadPoolExecutor(len(calls)) as threads:
        outputs = list(threads.map(lambda call: generate(**call), calls))
    seconds = time.perf_counter() - start
    return seconds, [
        new_tokens(output, call, [request])[0] for output, call, request in zip(outputs, calls, requests, strict=True)
    ]


def _native(subject: Subject, batches: Sequence[Sequence[ClientRequest]]) -> tuple[float, Tokens]:
    calls = [subject.batch(batch) for batch in batches]
    start = time.perf_counter()
    outputs = [subject.native(**call) for call in calls]
    seconds = time.perf_counter() - start
    return seconds, [
        row
        for output, call, batch in zip(outputs, calls, batches, strict=True)
        for row in new_tokens(output, call, batch)
    ]


def _scripts(arguments: Namespace) -> dict[str, Path]:
    """Each peer's script.

    Raises:
        OrcaError: There is no folder, or no such script in it.
    """
    if arguments.peers and arguments.peer_runners is None:
        raise OrcaError("--peers needs --peer-runners FOLDER, where their scripts lie.")
    scripts = {name: Path(arguments.peer_runners, f"{name}.py") for name in arguments.peers}
    if missing := [str(script) for script in scripts.values() if not script.is_file()]:
        raise OrcaError(f"There is no runner {', '.join(missing)}.")
    return scripts


def _peer(name: str, script: Path, model: str, arguments: Namespace) -> tuple[float, Tokens]:
    python = dict(arguments.peer_python).get(name, sys.executable)
    model = dict(arguments.peer_model).get(name, model)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "tokens.json")
        command = [python, str(script), "--model", model, "--requests", arguments.requests, "--out", str(out)]
        if arguments.threads:
            command += ["--threads", str(arguments.threads)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            raise PeerError(f"{python} cannot be run: {error}") from error
        if done.returncode:
            raise PeerError(f"exit status {done.returncode}: {done.stderr.strip()[-400:]}")
        return _printed_seconds(done.stdout), json.loads(out.read_text()) if out.exists() else []


def _printed_seconds(text: str) -> float:
    """The seconds of the one line that is a peer's result, among whatever else it prints."""
    for line in reversed(text.splitlines()):
        if line.startswith("{") and '"peer"' in line:
            return float(json.loads(line)["seconds"])
    raise PeerError(f"it printed no result: {text.strip()[-400:]}")


def _point(
    name: str,
    requests: Sequence[ClientRequest],
    times: Sequence[float],
    orca_times: Sequence[float],
    outputs: Sequence[Tokens],
    reference: Tokens,
    error: str | None,
) -> Point:
    total = sum(request.num_outputs for request in requests)
    if error is not None:
        return Point(name, total, None, None, None, 0, len(requests), error)
    return Point(
        engine=name,
        output_tokens=total,
        seconds=spread(times),
        tokens_per_second=spread(total / seconds for seconds in times),
        orca_speed=spread(theirs / ours for theirs, ours in zip(times, orca_times, strict=True)),
        equal_rows=min(sum(a == b for a, b in zip(rows, reference, strict=False)) for rows in outputs),
        rows=len(requests),
    )


def table(points: Sequence[Point]) -> str:
    """The points as text."""
    rows = [
        (p.engine, p.seconds or "-", p.tokens_per_second or "-", p.orca_speed or "-", f"{p.equal_rows} of {p.rows}")
        for p in points
    ]
    text = report.table(("engine", "seconds", "tokens/s", "seconds / Orca's", "rows equal"), rows)
    return "\n".join([text, *(f"{p.engine} failed: {p.error}" for p in points if p.error is not None)])


def draw(path: str, points: Sequence[Point]) -> None:
    """A bar for each engine that ran."""
    ran = [(p.engine, p.tokens_per_second) for p in points if p.tokens_per_second is not None]
    values = [(speed.median, speed.low, speed.high) for _, speed in ran]
    plot.draw_bars(path, [name for name, _ in ran], values, "output tokens/s", None)


def passed(points: Sequence[Point]) -> bool:
    """Whether every peer ran and Orca's tokens are native's."""
    return all(p.error is None and (p.engine != _ORCA or p.equal_rows == p.rows) for p in points)
