"""Serving requests as they arrive: a clock, a client for each request, and the servers they call."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from types import TracebackType
from typing import Any

from torch import Tensor

from orca_hf.bench.metrics import Timeline, mean_over_time
from orca_hf.bench.subject import Generate, Subject
from orca_hf.bench.workload import ClientRequest
from orca_hf.engines import Engine
from orca_hf.generate import OrcaGenerate

# Takes a request and the time at which it arrived; returns when it is answered.
Serve = Callable[[ClientRequest, float], Timeline]


def open_loop(requests: Sequence[ClientRequest], serve: Serve, served: Callable[[], object]) -> list[Timeline]:
    """Sends each request at its time, whether or not the others are answered, each from a thread of its own.

    Args:
        requests: In order of arrival.
        serve: Answers one request.
        served: Called after each answer.
    """

    def client(request: ClientRequest, arrival: float) -> Timeline:
        timeline = serve(request, arrival)
        served()
        return timeline

    start = time.perf_counter()
    with ThreadPoolExecutor(len(requests)) as threads:
        answers = []
        for request in requests:
            time.sleep(max(start + request.arrival - time.perf_counter(), 0.0))
            answers.append(threads.submit(client, request, start + request.arrival))
        return [answer.result() for answer in answers]


class TokenTimes:
    """A streamer that notes when tokens come, whatever they are."""

    def __init__(self, on_token: Callable[[int], object] | None = None) -> None:
        self.times: list[float] = []
        self._on_token = on_token
        self._has_prompt = False

    def put(self, value: Tensor) -> None:
        """Take the prompt first, then a token of each row."""
        if not self._has_prompt:
            self._has_prompt = True
            return
        self.times.append(time.perf_counter())
        if self._on_token is not None:
            self._on_token(len(self.times))

    def end(self) -> None:
        """Nothing to do."""


class SlotUse:
    """Slots reserved and used, noted at every token. Only the thread that drives the engine comes here."""

    def __init__(self, engine: Engine) -> None:
        self._kv = engine.scheduler.kv_manager
        self._used = 0
        self._reserved_at: list[tuple[float, float]] = []
        self._used_at: list[tuple[float, float]] = []

    def token(self, request: ClientRequest, count: int) -> None:
        """`request` has got its `count`-th token: one more slot is used, or, at the first one, those of its prompt."""
        self._used += len(request.prompt) if count == 1 else 1
        now = time.perf_counter()
        self._reserved_at.append((now, self._kv.num_reserved))
        self._used_at.append((now, self._used))
        if count == request.num_outputs:
            self._used -= len(request.prompt) + count - 1

    @property
    def reserved(self) -> float:
        """Mean share of all slots that is reserved: n_rsrv / n_slots."""
        return mean_over_time(self._reserved_at) / self._kv.num_slots

    @property
    def used(self) -> float:
        """Mean share of the reserved slots that hold a token."""
        return mean_over_time(self._used_at) / mean_over_time(self._reserved_at)


class OrcaServer:
    """Every client calls generate() itself; the calls share a batch, or wait, as the scheduler decides.

    Args:
        subject: The model.
        generate: A generate() by Orca that has been warmed up.
    """

    def __init__(self, subject: Subject, generate: OrcaGenerate) -> None:
        self._subject = subject
        self._generate = generate
        (engine,) = generate.engines
        self.slots = SlotUse(engine)

    def __enter__(self) -> Serve:
        return self._serve

    def __exit__(self, *_: object) -> None:
        pass

    def _serve(self, request: ClientRequest, arrival: float) -> Timeline:
        streamer = TokenTimes(lambda count: self.slots.token(request, count))
        self._generate(**self._subject.batch([request]), streamer=streamer)
        return Timeline(arrival, tuple(streamer.times), time.perf_counter())


class NativeServer:
    """What one writes around native generate(): whoever waits, up to a batch, is answered together; then the next.

    Args:
        subject: The model.
        generate: Its native generate().
        max_batch_size: Most requests in a call; 1 for one at a time.
    """

    def __init__(self, subject: Subject, generate: Generate, max_batch_size: int) -> None:
        self._subject = subject
        self._generate = generate
        self._max_batch_size = max_batch_size
        self._queue: SimpleQueue[tuple[ClientRequest, float, Future[Timeline]] | None] = SimpleQueue()
        self._worker = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> Serve:
        self._worker.start()
        return self._serve

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._queue.put(None)
        self._worker.join()

    def _serve(self, request: ClientRequest, arrival: float) -> Timeline:
        answer: Future[Timeline] = Future()
        self._queue.put((request, arrival, answer))
        return answer.result()

    def _work(self) -> None:
        while (first := self._queue.get()) is not None:
            batch = [first]
            while len(batch) < self._max_batch_size and not self._queue.empty():
                another = self._queue.get()
                assert another is not None, "the end is put when every client has its answer"
                batch.append(another)
            self._answer(batch)

    def _answer(self, batch: list[tuple[ClientRequest, float, Future[Timeline]]]) -> None:
        streamer = TokenTimes()
        call: dict[str, Any] = self._subject.batch([request for request, _, _ in batch])
        try:
            self._generate(**call, streamer=streamer)
        except Exception as error:  # noqa: BLE001 - it is each client's
            for _, _, answer in batch:
                answer.set_exception(error)
            return
        end = time.perf_counter()
        for request, arrival, answer in batch:
            answer.set_result(Timeline(arrival, tuple(streamer.times[: request.num_outputs]), end))
