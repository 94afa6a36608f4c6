"""Submitted requests that Orca cannot run: native generate(), one request at a time, on a thread of its own."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation import GenerationMixin, GenerationMode
from transformers.generation.streamers import BaseStreamer

from orca_hf.errors import CancelledError, DeadlineError
from orca_hf.generate import OrcaGenerate, Preparation
from orca_hf.random_state import reseeded
from orca_hf.serving.logprobs import sequence_logprobs
from orca_hf.serving.stream import Stream

_STREAMED = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


@dataclass(slots=True)
class NativeRequest:
    """A request for native generate().

    Attributes:
        stream: Who reads it.
        arguments: Of generate(), by name.
        preparation: What is known of them; its reasons go to the log.
        seed: Of the random draws, or None for the default generator as it is.
        inference_mode: The submitting thread's.
        prompt_is_streamed: Whether the streamer has the prompt.
    """

    stream: Stream
    arguments: dict[str, Any]
    preparation: Preparation
    seed: int | None
    inference_mode: bool
    prompt_is_streamed: bool = False


class NativeWorker:
    """Runs requests natively, in order of arrival, from a thread that is there while there are any.

    Args:
        generate: The wrapped model's.
        clock: Seconds that never go back.
    """

    def __init__(self, generate: OrcaGenerate, clock: Callable[[], float]) -> None:
        self._generate = generate
        self._clock = clock
        self._lock = threading.Lock()
        self._queue: deque[NativeRequest] = deque()
        self._runs = False

    @property
    def num_waiting(self) -> int:
        """Requests that have not begun."""
        return len(self._queue)

    @property
    def num_running(self) -> int:
        """Requests that run: 1 or 0."""
        return int(self._runs)

    def submit(self, request: NativeRequest) -> None:
        """Queue a request; returns at once."""
        with self._lock:
            self._queue.append(request)
            if not self._runs:
                self._runs = True
                threading.Thread(target=self._work, name="orca-native", daemon=True).start()

    def check_all(self) -> None:
        """End what waits and whose time is over, or that nobody wants."""
        for request in list(self._queue):
            self._check(request.stream)

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._runs = False
                    return
                request = self._queue.popleft()
            self._serve(request)

    def _serve(self, request: NativeRequest) -> None:
        stream = request.stream
        self._check(stream)
        if stream.is_done():
            stream.end_streamer()
            return
        try:
            sequence = self._run(request)
        except BaseException as error:  # noqa: BLE001 - a user's code may raise anything; its readers see it
            stream.end_streamer()
            stream.finish(error)
        else:
            stream.end_streamer()
            stream.finish(None, sequence)

    def _run(self, request: NativeRequest) -> Tensor:
        stream, model = request.stream, self._generate.model
        arguments = dict(request.arguments)
        watched = StoppingCriteriaList(arguments.get("stopping_criteria") or ())
        watched.append(_Watch(lambda: self._watch(stream)))
        arguments["stopping_criteria"] = watched
        if self._can_stream(request):
            arguments["streamer"] = _Tee(stream, request.prompt_is_streamed)
        own_random = nullcontext() if request.seed is None else reseeded(request.seed)
        with torch.inference_mode(request.inference_mode), own_random:
            output = self._generate.run_natively(request.preparation.reasons, **arguments)
        sequence: Tensor = (output if isinstance(output, Tensor) else output.sequences)[0]
        prompt_len = 0 if model.config.is_encoder_decoder else stream.input_ids.shape[1]
        if stream.num_logprobs is not None and prompt_len and len(sequence) > prompt_len:
            stream.logprobs = sequence_logprobs(model, sequence[None], stream.num_logprobs, prompt_len)
        stream.catch_up(sequence.tolist()[prompt_len:])
        return sequence

    def _can_stream(self, request: NativeRequest) -> bool:
        """Whether generate() gives out tokens one by one, as they stay."""
        arguments, merged = request.arguments, request.preparation.generation_config
        return (
            type(self._generate.model).generate is GenerationMixin.generate  # type: ignore[attr-defined]
            and merged.get_generation_mode(arguments.get("assistant_model")) in _STREAMED
            and arguments.get("custom_generate") is None
            and merged.cache_implementation != "paged"
        )

    def _watch(self, stream: Stream) -> None:
        self._check(stream)
        self.check_all()
        if stream.error is not None:
            raise stream.error

    def _check(self, stream: Stream) -> None:
        if stream.abandoned:
            stream.finish(CancelledError("Its handle is gone, so that nobody can read it."))
        elif stream.deadline is not None and stream.deadline <= self._clock():
            stream.finish(DeadlineError("The request's deadline has passed before its end."))


class _Watch(StoppingCriteria):
    """Looks, at every token, whether the request is to go on; ends it by an error, which no decoding mode overlooks."""

    def __init__(self, look: Callable[[], None]) -> None:
        self._look = look

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: Any) -> torch.BoolTensor:
        self._look()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)  # type: ignore[return-value]


class _Tee(BaseStreamer):
    """Gives a call's tokens to its stream and to the user's streamer."""

    def __init__(self, stream: Stream, prompt_is_streamed: bool) -> None:
        self._stream = stream
        self._has_prompt = False
        self._prompt_is_streamed = prompt_is_streamed
        self._tokens: list[int] = []

    def put(self, value: Tensor) -> None:
        is_prompt, self._has_prompt = not self._has_prompt, True
        if self._stream.streamer is not None and not (is_prompt and self._prompt_is_streamed):
            self._stream.streamer.put(value)
        if not is_prompt:
            self._tokens += value.reshape(-1).tolist()
            self._stream.catch_up(self._tokens)

    def end(self) -> None:
        error = self._stream.end_streamer()
        if error is not None:
            raise error
