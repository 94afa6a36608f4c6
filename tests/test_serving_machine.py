"""Promise: whatever is submitted, cancelled, dropped, late or broken, in whatever order: every request ends, once,
with what it should end with, and no slot is lost. The engine is real, the model's forwards and the clock are not."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tiny import VOCAB, make_model

import orca_hf
from orca_hf import CancelledError, CapacityError, DeadlineError, ForwardError, OrcaConfig, StoppedError
from orca_hf.engines import Engine
from orca_hf.runner import ModelRunner
from orca_hf.serving import ServingEngine

# So small that requests wait for slots, and prompts are cut into chunks.
CONFIG = OrcaConfig(max_batch_size=3, max_batch_tokens=7, max_slots=64, block_size=4)
EXPECTED_ERRORS = (CancelledError, DeadlineError, ForwardError, StoppedError)


class FaultError(Exception):
    """What a forward raises when it is told to."""


class FakeRunner(ModelRunner):
    """Forwards that need no model: the next token is the last one plus one. They fail as they are told."""

    def __init__(self, real: ModelRunner) -> None:
        self.__dict__.update(real.__dict__)
        self.faults: list[BaseException] = []
        self.alone: set[int] = set()  # requests that met a fault with nothing left to halve
        self.most = 99  # requests at once; more of them run out of memory

    def run(self, iteration, remaining=0):
        if self.faults:
            fault = self.faults.pop()
            if len(iteration.steps) == iteration.num_tokens == 1:
                self.alone.add(iteration.steps[0].request.request_id)
            raise fault
        if len(iteration.steps) > self.most:
            raise torch.OutOfMemoryError("the machine is small")
        rows = [
            step.request.tokens(step.start, step.start + step.length)[-1] for step in iteration.steps if step.samples
        ]
        logits = torch.zeros(max(1, len(rows)), VOCAB)
        for row, token in enumerate(rows):
            logits[row, (token + 1) % VOCAB] = 1
        return logits


class Watch:
    """A request as the machine believes it to be."""

    def __init__(self, handle, first, num_new, deadline):
        self.handle, self.first, self.num_new, self.deadline = handle, first, num_new, deadline
        self.cancelled = False
        self.seen = 0

    def expected(self):
        return [(self.first + 1 + i) % VOCAB for i in range(self.num_new)]


class ServingMachine(RuleBasedStateMachine):
    model = None

    def __init__(self):
        super().__init__()
        if ServingMachine.model is None:
            ServingMachine.model = make_model()
        self.now = 0.0
        generate = orca_hf.wrap(orca_hf.unwrap(ServingMachine.model), CONFIG).generate
        self.engine = ServingEngine(generate, clock=lambda: self.now)
        self.core: Engine = generate.engines[0]
        self.core.clock = lambda: self.now
        self.runner = self.core.runner = FakeRunner(self.core.runner)
        self.watched: list[Watch] = []
        self.num_dropped = 0
        self.accepts = True

    @rule(
        first=st.integers(3, VOCAB - 1),
        prompt_len=st.integers(1, 9),
        num_new=st.integers(1, 6),
        deadline=st.none() | st.integers(0, 5),
    )
    def submit(self, first, prompt_len, num_new, deadline):
        if not self.accepts:
            with pytest.raises(StoppedError):
                self.engine.submit([first], max_new_tokens=1)
            return
        handle = self.engine.submit([5] * (prompt_len - 1) + [first], max_new_tokens=num_new, deadline=deadline)
        until = None if deadline is None else self.now + deadline
        self.watched.append(Watch(handle, first, num_new, until))

    @rule()
    def submit_too_much(self):
        if self.accepts:
            with pytest.raises(CapacityError):
                self.engine.submit([5] * 40, max_new_tokens=30)

    @precondition(lambda self: self.watched)
    @rule(index=st.integers(0, 50))
    def cancel(self, index):
        watch = self.watched[index % len(self.watched)]
        watch.cancelled |= not watch.handle.done()
        watch.handle.cancel()
        assert watch.handle.done()

    @precondition(lambda self: self.watched)
    @rule(index=st.integers(0, 50))
    def drop(self, index):
        watch = self.watched.pop(index % len(self.watched))
        self.num_dropped += 1
        del watch  # and with it its handle, which nothing else holds while the request runs

    @rule(seconds=st.integers(1, 4))
    def pass_time(self, seconds):
        self.now += seconds

    @rule(steps=st.integers(1, 8))
    def step(self, steps):
        """Some iterations, as whoever drives runs them."""
        left = [steps]

        def enough():
            left[0] -= 1
            return left[0] < 0

        self.core.drive(enough)

    @precondition(lambda self: self.watched)
    @rule(index=st.integers(0, 50))
    def read_a_token(self, index):
        watch = self.watched[index % len(self.watched)]
        try:
            token = next(iter(watch.handle), None)
        except EXPECTED_ERRORS:
            assert watch.handle.done()
        else:
            assert token == watch.expected()[0]

    @rule()
    def a_forward_raises(self):
        self.runner.faults.append(FaultError("in the forward"))

    @rule()
    def a_forward_runs_out_of_memory(self):
        self.runner.faults.append(torch.OutOfMemoryError("once"))

    @rule(most=st.sampled_from([1, 2, 99]))
    def memory_changes(self, most):
        self.runner.most = most

    @precondition(lambda self: not self.core.scheduler.idle)
    @rule()
    def the_driver_is_interrupted(self):
        self.runner.faults.append(KeyboardInterrupt())
        with suppress(KeyboardInterrupt):
            self.core.drive(lambda: not self.runner.faults)
        self.runner.faults = [fault for fault in self.runner.faults if not isinstance(fault, KeyboardInterrupt)]

    @rule()
    def the_driving_thread_dies(self):
        self.core.fail_submitted(StoppedError("the thread has died"))

    @rule(timeout=st.sampled_from([0, 1000]))
    def drain(self, timeout):
        self.runner.most = 99
        running = [watch for watch in self.watched if not watch.handle.done()]
        assert self.engine.drain(timeout) or timeout == 0
        self.accepts = False
        for watch in running:
            watch.cancelled = timeout == 0
        assert all(watch.handle.done() for watch in self.watched)

    @precondition(lambda self: not self.accepts)
    @rule()
    def serve_again(self):
        with self.engine._lock:
            self.engine._accepts = True
        self.accepts = True

    @invariant()
    def nobody_drives_and_the_ledger_is_right(self):
        assert not self.core.is_driven
        assert self.core._in_flight is None
        assert self.core._pending == {}
        stats = self.engine.stats()  # which ends what was dropped or is late
        assert self.core.scheduler.faults() == []
        assert stats.num_used <= stats.num_reserved <= stats.num_slots
        running = sum(not watch.handle.done() for watch in self.watched)
        assert stats.num_running + stats.num_waiting == running == len(self.core._calls) == len(self.engine._live)
        if not running:
            assert stats.num_reserved == 0

    @invariant()
    def every_request_is_what_it_should_be(self):
        for watch in self.watched:
            self.check(watch)

    def check(self, watch):
        handle = watch.handle
        assert handle.token_ids == watch.expected()[: len(handle.token_ids)]
        assert len(handle.token_ids) >= watch.seen
        watch.seen = len(handle.token_ids)
        is_late = watch.deadline is not None and watch.deadline <= self.now
        if not handle.done():
            assert handle.finish_reason is None
            assert not is_late
            return
        try:
            row = handle.result(0)
        except CancelledError:
            assert watch.cancelled
            assert handle.finish_reason == "cancelled"
        except DeadlineError:
            assert is_late
            assert handle.finish_reason == "deadline"
        except StoppedError:
            assert handle.finish_reason == "error"
        except ForwardError as error:
            assert handle.finish_reason == "error"
            # Memory that is short for several requests, or tokens, fails none of them.
            assert isinstance(error.__cause__, FaultError) or handle.request_id in self.runner.alone
        else:
            assert row.tolist()[-watch.num_new :] == watch.expected()
            assert handle.finish_reason == "length"

    @invariant()
    def ends_are_counted(self):
        stats = self.engine.stats()
        ended = sum(watch.handle.done() for watch in self.watched)
        counted = stats.num_finished + stats.num_cancelled + stats.num_failed
        assert ended <= counted == ended + self.num_dropped

    def teardown(self):
        self.runner.faults.clear()
        self.runner.most = 99
        for watch in self.watched:
            with suppress(*EXPECTED_ERRORS):
                watch.handle.result(0 if watch.handle.done() else 1000)
            assert watch.handle.done()
        self.nobody_drives_and_the_ledger_is_right()
        self.every_request_is_what_it_should_be()
        assert self.core.idle
        assert self.engine.stats().num_reserved == 0


TestServing = ServingMachine.TestCase
TestServing.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
