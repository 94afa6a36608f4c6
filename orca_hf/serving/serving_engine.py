"""The serving engine: takes requests one by one, without waiting for the model, and gives a handle for each."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from orca_hf.config import OrcaConfig
from orca_hf.engines import PATIENCE_S, Engine
from orca_hf.errors import CancelledError, OrcaError, StoppedError
from orca_hf.generate import OrcaGenerate, Preparation
from orca_hf.interruption import outermost
from orca_hf.random_state import draw_seed
from orca_hf.runner import input_device
from orca_hf.sampling import Streamer
from orca_hf.serving.driver import Driver
from orca_hf.serving.handle import RequestHandle
from orca_hf.serving.logprobs import TokenLogprobs, logprobs_in_pieces, sequence_logprobs
from orca_hf.serving.native import NativeRequest, NativeWorker
from orca_hf.serving.stats import ServingStats
from orca_hf.serving.stream import Stream
from orca_hf.serving.submission import as_row, check_config, check_options
from orca_hf.wrapping import orca_generate, wrap

_DEAD = "The thread that drives the engine has died; enter serving() again."


def engine(model: object, config: OrcaConfig | None = None) -> ServingEngine:
    """Serve a model's requests one by one; wraps it if it is not wrapped.

    What is submitted shares its iterations with the model's `generate()` calls.

    Args:
        model: As for `wrap`.
        config: As for `wrap`.

    Raises:
        ModelError: It is not a causal language model.
        ConfigError: `config` is not an `OrcaConfig`.
    """
    return ServingEngine(orca_generate(wrap(model, config)))


class ServingEngine:
    """Takes requests for one wrapped model. Made by `orca_hf.engine`.

    Within `serving()` a thread of its own drives. Otherwise whoever waits for a result does, as with generate() calls;
    for tasks of an event loop, a thread that is there while there is work.

    Args:
        generate: The wrapped model's generate().
        clock: Seconds that never go back.
    """

    def __init__(self, generate: OrcaGenerate, clock: Callable[[], float] = time.monotonic) -> None:
        self._generate = generate
        self._clock = clock
        self._native = NativeWorker(generate, clock)
        self._lock = threading.RLock()  # guards what follows; taken within an engine's, never around it
        self._live: set[Stream] = set()
        self._drivers: dict[Engine, Driver] = {}
        self._accepts = True
        self._serves = False
        self._weights_are_fixed = False
        self._ended = {"finished": 0, "cancelled": 0, "failed": 0}
        generate.warm_up()

    def submit(
        self,
        input_ids: Sequence[int] | Tensor,
        generation_config: GenerationConfig | None = None,
        *,
        streamer: Streamer | None = None,
        logits_processor: LogitsProcessorList | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        seed: int | None = None,
        deadline: float | None = None,
        logprobs: int | None = None,
        **generate_kwargs: Any,
    ) -> RequestHandle:
        """Queue a request and return at once.

        Args:
            input_ids: The prompt's token ids: a list, (n,) or (1, n).
            generation_config: As for generate().
            streamer: As for generate(): gets the prompt now, and the tokens from whichever thread drives.
            logits_processor: As for generate().
            stopping_criteria: As for generate().
            seed: The request draws as native generate() does after `torch.manual_seed(seed)`, whatever else runs. None
                takes a seed from the default generator, if it is to be sampled.
            deadline: Seconds from now, after which it is stopped.
            logprobs: How many alternatives to note with each token's log-probability; None notes nothing.
            **generate_kwargs: As for generate().

        Raises:
            RequestError: The request is none: empty, of several rows, or an option is not what it should be.
            StoppedError: The engine takes no requests any more.
            Exception: What generate() raises for such a call before its first forward.
        """
        self._refuse_if_stopped()
        check_options(seed, deadline, logprobs)
        row = as_row(input_ids, input_device(self._generate.model))
        arguments = {
            "inputs": row,
            "generation_config": copy.deepcopy(generation_config),
            "logits_processor": logits_processor,
            "stopping_criteria": stopping_criteria,
            "streamer": streamer,
            **generate_kwargs,
        }
        stream = Stream(
            row,
            num_logprobs=logprobs,
            streamer=streamer,
            deadline=None if deadline is None else self._clock() + deadline,
            clock=self._clock,
            on_end=self._ended_one,
            locks=(self._lock,),
        )
        preparation = self._generate.prepare(**arguments)
        check_config(preparation.generation_config)
        stream.criteria = preparation.criteria
        if seed is None and preparation.generation_config.do_sample:
            seed = draw_seed(row.device)
        native = NativeRequest(stream, arguments, preparation, seed, torch.is_inference_mode_enabled())
        handle = RequestHandle(stream, self)
        if preparation.call is None:
            self._accept(stream)
            self._native.submit(native)
        else:
            self._submit_to_orca(stream, preparation, native)
        return handle

    def _submit_to_orca(self, stream: Stream, preparation: Preparation, native: NativeRequest) -> None:
        call = preparation.call
        assert call is not None
        generation = call.generation(stream.streamer, native.seed)
        generation.listener, generation.deadline = stream, stream.deadline
        if stream.streamer is not None:
            stream.streamer.put(stream.input_ids.cpu())

        def fall_back(reason: str) -> None:
            native.preparation = replace(preparation, call=None, reasons=[reason])
            native.prompt_is_streamed = True
            self._native.submit(native)

        stream.fall_back = fall_back
        stream.engine, stream.generation = call.engine, generation
        self._accept(stream)
        try:
            call.engine.submit(generation, check_weights=not self._weights_are_fixed)
        except BaseException:
            generation.close(discard=True)
            with self._lock:
                self._live.discard(stream)
            raise
        with self._lock:
            if self._serves:
                self._driver(call.engine).start(linger=True)
        if not self.is_healthy():  # it may have died after the request was accepted, and before it was there to be told
            stream.cancel(StoppedError(_DEAD))

    def _accept(self, stream: Stream) -> None:
        with self._lock:
            self._refuse_if_stopped()
            self._live.add(stream)

    def _refuse_if_stopped(self) -> None:
        if not self._accepts:
            raise StoppedError("The engine has been told to stop and takes no requests; enter serving() again.")
        if not self.is_healthy():
            raise StoppedError(_DEAD)

    def _ended_one(self, stream: Stream) -> None:
        reason = "finished" if stream.error is None else stream.finish_reason
        kind = {"finished": "finished", "cancelled": "cancelled", "deadline": "cancelled"}.get(reason or "", "failed")
        with self._lock:
            self._live.discard(stream)
            self._ended[kind] += 1

    def is_healthy(self) -> bool:
        """Whether no thread that drives has died."""
        with self._lock:
            return all(driver.error is None for driver in self._drivers.values())

    def stats(self) -> ServingStats:
        """What it does at this moment, and what it has done."""
        self._native.check_all()
        engines = [each.stats for each in self._generate.engines]
        work = self._generate.work.done
        with self._lock:
            return ServingStats(
                is_healthy=self.is_healthy(),
                is_accepting=self._accepts,
                num_running=sum(each.num_admitted for each in engines) + self._native.num_running,
                num_waiting=sum(each.num_waiting for each in engines) + self._native.num_waiting,
                num_slots=sum(each.num_slots for each in engines),
                num_reserved=sum(each.num_reserved for each in engines),
                num_used=sum(each.num_used for each in engines),
                num_iterations=work.num_iterations,
                num_prompt_tokens=work.num_prompt_tokens,
                num_generated_tokens=work.num_generated_tokens,
                num_draft_tokens=work.num_draft_tokens,
                num_accepted_tokens=work.num_accepted_tokens,
                num_native=self._generate.num_native,
                num_finished=self._ended["finished"],
                num_cancelled=self._ended["cancelled"],
                num_failed=self._ended["failed"],
                recent=work.recent,
            )

    def prompt_logprobs(self, input_ids: Sequence[int] | Tensor, k: int = 0) -> list[TokenLogprobs | None]:
        """How likely each token of a prompt is after those before it; None for the first.

        Waits for the model, and for iterations: a long prompt is looked at in pieces, between them.

        Args:
            input_ids: The prompt's token ids: a list, (n,) or (1, n).
            k: How many of the most likely tokens to give at each place.
        """
        check_options(None, None, k)
        model = self._generate.model
        row = as_row(input_ids, input_device(model))
        whole = {"inputs": row, "attention_mask": torch.ones_like(row), "max_new_tokens": 1, "num_beams": 1}
        is_run_by_orca = self._generate.prepare(**whole, do_sample=False).call is not None
        look = logprobs_in_pieces if is_run_by_orca else sequence_logprobs
        return [None, *look(model, row, k)]

    @contextmanager
    def serving(self, *, weights_are_fixed: bool = False) -> Iterator[ServingEngine]:
        """Have a thread of its own drive within the block; leaving it finishes what was submitted, then stops.

        After an error in the block, what was submitted is cancelled.

        Args:
            weights_are_fixed: Nobody writes into the weights through `.data`, or in another way that PyTorch does not
                count, while requests run. Otherwise each request that joins others has packed weights compared with
                the model's bit by bit, which takes as long as reading them.
        """
        with self._lock:
            if self._serves:
                raise OrcaError("The engine is serving already.")
            self._serves = self._accepts = True
            self._weights_are_fixed = weights_are_fixed
            self._drivers.clear()
            for each in self._generate.engines:
                self._driver(each).start(linger=True)
        try:
            yield self
            self.drain()
        finally:
            self.shutdown()

    def drain(self, timeout: float | None = None) -> bool:
        """Take no more requests, finish those that are there, and cancel what has not ended after `timeout` seconds.

        Returns:
            Whether all ended in time.
        """
        with self._lock:
            self._accepts = False
            live = list(self._live)
        limit = None if timeout is None else self._clock() + timeout
        for stream in live:
            self.wait(stream, stream.is_done, None if limit is None else max(0.0, limit - self._clock()))
        unfinished = [stream for stream in live if not stream.is_done()]
        for stream in unfinished:
            stream.cancel(CancelledError("The engine has stopped."))
        return not unfinished

    def shutdown(self) -> None:
        """Take no more requests, cancel those that are there, and stop the thread."""
        self.drain(timeout=0)
        with self._lock:
            drivers = list(self._drivers.values())
            self._serves = False
        for driver in drivers:
            driver.stop()

    def wait(self, stream: Stream, ready: Callable[[], bool], timeout: float | None) -> bool:
        """Wait until `ready()`, driving if nobody else does; for handles.

        Returns:
            False if `timeout` seconds passed before.
        """
        return outermost(lambda: self._wait(stream, ready, timeout), (stream.lock, self._lock))

    def _wait(self, stream: Stream, ready: Callable[[], bool], timeout: float | None) -> bool:
        limit = None if timeout is None else self._clock() + timeout

        def over() -> bool:
            return ready() or (limit is not None and self._clock() >= limit)

        while not over():
            each = stream.engine
            if each is not None and each.driven_by_this_thread:
                raise OrcaError("A request is waited for inside a processor, criterion or streamer of a running call.")
            if each is not None and not self._has_driver(each) and each.drive(over):
                continue
            rest = PATIENCE_S if limit is None else max(0.0, min(PATIENCE_S, limit - self._clock()))
            stream.wait(lambda: ready() or self._is_undriven(stream), rest)
            if each is not None:
                each.look_after_driver()
        return ready()

    def have_driven(self, stream: Stream) -> None:
        """See to it that a thread drives, for a reader that cannot; for handles."""
        each = stream.engine
        if each is not None and not self._has_driver(each):
            with self._lock:
                self._driver(each).start()

    def _driver(self, each: Engine) -> Driver:
        if each not in self._drivers:
            self._drivers[each] = Driver(each)
        return self._drivers[each]

    def _has_driver(self, each: Engine) -> bool:
        driver = self._drivers.get(each)
        return driver is not None and driver.runs

    def _is_undriven(self, stream: Stream) -> bool:
        """Whether a request is left for a thread that waits for it to drive."""
        each, generation = stream.engine, stream.generation
        return (
            each is not None
            and generation is not None
            and not generation.done
            and not each.is_driven
            and not self._has_driver(each)
        )
