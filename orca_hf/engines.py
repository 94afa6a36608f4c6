"""The engine: owns scheduler and runner, and lets the threads that wait for an answer drive it.

There is no background thread. A thread whose call is unfinished and that finds nobody driving runs iterations, for
everybody; the others wait. When the driver's own call is done, a waiting thread takes over. So any number of threads
share one batch, and nothing outlives their calls.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orca_hf.config import OrcaConfig
from orca_hf.errors import OrcaError
from orca_hf.kv_manager import KVManager
from orca_hf.request import Request
from orca_hf.runner import ModelRunner
from orca_hf.sampling import Generation, greedy_tokens
from orca_hf.scheduler import Iteration, Scheduler, Step
from orca_hf.trial import try_out
from orca_hf.warping import RowProbabilities, select_rows

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The engine's state at one moment, and its work so far.

    Attributes:
        num_waiting: Requests that hold no slots yet.
        num_admitted: Requests that hold slots.
        num_slots: Slots there are.
        num_reserved: Slots reserved.
        num_iterations: Iterations run.
        num_tokens: Tokens that went through the model.
        kv_bytes: K/V memory that is set aside.
        packed_bytes: Memory of packed weights.
    """

    num_waiting: int
    num_admitted: int
    num_slots: int
    num_reserved: int
    num_iterations: int
    num_tokens: int
    kv_bytes: int
    packed_bytes: int


class Engine:
    """Serves generate() calls of many threads on one model.

    Args:
        runner: Runs the iterations; its pool is made here.
        config: The settings.

    Raises:
        UnsupportedError: The runner cannot run its model.
        CapacityError: There is no memory for a pool.
    """

    scheduler_type: type[Scheduler] = Scheduler  # the bench compares with another policy, in a subclass

    def __init__(self, runner: ModelRunner, config: OrcaConfig) -> None:
        self.runner = runner
        self.config = config
        try_out(runner)
        self.scheduler = self._make_scheduler()
        self._changed = threading.Condition()  # guards the scheduler; notified when a driver stops
        self._driver: int | None = None  # the driving thread
        self._in_flight: Iteration | None = None
        self._pending: dict[Generation, dict[int, Step]] = {}  # sampling steps by logits row, not handed out yet
        self._num_iterations = 0
        self._num_tokens = 0

    def _make_scheduler(self) -> Scheduler:
        return self.scheduler_type(
            KVManager(self.runner.make_pool(), self.config.block_size),
            max_batch_size=self.config.max_batch_size,
            max_batch_tokens=self.config.max_batch_tokens,
        )

    @property
    def stats(self) -> EngineStats:
        """A consistent picture of the engine."""
        with self._changed:
            kv = self.scheduler.kv_manager
            return EngineStats(
                num_waiting=self.scheduler.num_waiting,
                num_admitted=self.scheduler.num_admitted,
                num_slots=kv.num_slots,
                num_reserved=kv.num_reserved,
                num_iterations=self._num_iterations,
                num_tokens=self._num_tokens,
                kv_bytes=self.runner.pool.num_bytes,
                packed_bytes=self.runner.packed.num_bytes,
            )

    @property
    def idle(self) -> bool:
        """Whether nobody waits for anything."""
        with self._changed:
            return self.scheduler.idle and self._driver is None

    @property
    def driven_by_this_thread(self) -> bool:
        """Whether the caller is inside an iteration: a processor, criterion, streamer or hook that calls back."""
        return self._driver == threading.get_ident()

    def fits_at_once(self, prompt_lens: Sequence[int], max_new_tokens: int) -> bool:
        """Whether all rows of a call could hold their slots at the same time.

        Raises:
            CapacityError: One of the rows could never hold its slots, not even alone.
        """
        with self._changed:
            if self.idle and not self.runner.pool.layers:
                # Its memory was given back, and may have become scarce since.
                self.scheduler = self._make_scheduler()
            kv = self.scheduler.kv_manager
        for prompt_len in prompt_lens:
            kv.check_fits(prompt_len, max_new_tokens)
        return sum(kv.blocks_for(prompt_len + max_new_tokens - 1) for prompt_len in prompt_lens) <= kv.num_blocks

    def run(self, generation: Generation) -> None:
        """Serve one call to its end, driving or waiting.

        Raises:
            BaseException: Whatever ended the call, or interrupted it; its slots are back.
        """
        try:
            with self._changed:
                if self.scheduler.idle:
                    self.runner.start()
                for request in generation.requests:
                    # Another call may have found less memory since this one was judged.
                    self.scheduler.kv_manager.check_fits(len(request.prompt), request.max_new_tokens)
                for request in generation.requests:
                    self.scheduler.submit(request)
            while not generation.done:
                if self._become_driver(generation):
                    try:
                        while not generation.done:
                            self._run_one_iteration()
                    finally:
                        self.runner.leave_cores()
                        self._stop_driving()
        except BaseException as error:
            # This thread's own interruption (Ctrl-C), or a defect of the engine: either way the call is over.
            generation.fail(error)
            raise
        finally:
            self._end(generation)
        if generation.error is not None:
            raise generation.error

    def release(self) -> bool:
        """Give K/V memory and packed weights back, if the engine is idle.

        Returns:
            Whether it was.
        """
        with self._changed:
            if not self.idle:
                return False
            self.runner.release()
            return True

    def _become_driver(self, generation: Generation) -> bool:
        with self._changed:
            while not generation.done and self._driver is not None:
                self._changed.wait()
            if generation.done:
                return False
            self._driver = threading.get_ident()
            return True

    def _stop_driving(self) -> None:
        with self._changed:
            self._recover()
            self._driver = None
            self._changed.notify_all()

    def _recover(self) -> None:
        """Make the state whole after an interruption, at whatever point it came; the lock is held."""
        if self._in_flight is not None:
            # The steps run again, under the next driver; their K/V are simply written once more.
            self.scheduler.abandon(self._in_flight)
            self._in_flight = None
        for index, (generation, steps) in enumerate(self._pending.items()):
            if index == 0:  # its turn may have been half done
                self._fail(generation, OrcaError("The thread that ran this call's iteration was interrupted."))
            else:
                for step in steps.values():
                    self.scheduler.rewind(step)
        self._pending = {}

    def _run_one_iteration(self) -> None:
        with self._changed:
            iteration = self._in_flight = self.scheduler.schedule()
        if iteration is None:
            raise OrcaError(
                "The engine has unfinished requests and none that can run; this is a defect of orca_hf, please report "
                f"it with this state: {self.scheduler.num_waiting} waiting, {self.scheduler.num_admitted} admitted."
            )
        try:
            logits = self.runner.run(iteration, self._remaining(iteration))
        except Exception as error:  # noqa: BLE001
            # No row of a failed forward can be told from the others, so all calls in it end.
            with self._changed:
                self.scheduler.abandon(iteration)
                self._in_flight = None
                for generation in {step.request.owner for step in iteration.steps}:
                    self._fail(generation, error)
            return
        with self._changed:
            for row, step in enumerate(step for step in iteration.steps if step.samples):
                self._pending.setdefault(step.request.owner, {})[row] = step
            self.scheduler.complete(iteration)
            self._in_flight = None
            self._num_iterations += 1
            self._num_tokens += iteration.num_tokens
        self._hand_out(logits)

    def _hand_out(self, logits: Tensor) -> None:
        """Gives each call the logits of its rows; what it makes of them is its own affair, errors included."""
        greedy = [row for generation, steps in self._pending.items() if generation.is_plain_greedy for row in steps]
        tokens = dict(zip(greedy, greedy_tokens(select_rows(logits, greedy)), strict=True)) if greedy else {}
        probabilities = RowProbabilities(logits)
        for generation, steps in self._pending.items():
            if generation.is_plain_sampling:
                generation.want_probabilities(list(steps), probabilities)
        while self._pending:
            generation, steps = next(iter(self._pending.items()))
            rows = [row for row, step in steps.items() if not step.request.finished]  # some were cancelled in flight
            requests = [steps[row].request for row in rows]
            try:
                if generation.is_plain_greedy:
                    accepted = generation.accept_tokens(requests, [tokens[row] for row in rows])
                elif generation.is_plain_sampling:
                    drawn = generation.draw_tokens(requests, rows, probabilities)
                    accepted = generation.accept_tokens(requests, drawn)
                elif rows:
                    accepted = generation.accept_logits(requests, select_rows(logits, rows))
                else:
                    accepted = []
                self._append(generation, accepted)
            except Exception as error:  # noqa: BLE001
                # A user's processor, criterion or streamer raised: its own call ends with it, no other.
                with self._changed:
                    self._fail(generation, error)
            del self._pending[generation]

    def _append(self, generation: Generation, accepted: list[tuple[Request, int, bool]]) -> None:
        with self._changed:
            if generation.options.output_cache and accepted and all(over for _, _, over in accepted):
                generation.kv_states = self.runner.read_kv(generation.requests)
            for request, token, over in accepted:
                if request.finished:
                    continue  # cancelled in the meantime
                self.scheduler.append(request, token)
                if over:
                    self._end_row(request)
            if generation.done:
                self._changed.notify_all()

    def _end_row(self, request: Request) -> None:
        """A row has its last token: its slots are free, and its caller is answered at once; the lock is held."""
        self.scheduler.finish(request)
        request.owner.row_ended()

    def _fail(self, generation: Generation, error: BaseException) -> None:
        """End a call with `error`; the lock is held."""
        generation.fail(error)
        for request in generation.requests:
            self.scheduler.cancel(request)
        self._changed.notify_all()

    def _end(self, generation: Generation) -> None:
        """A call's thread leaves: whatever of it is not over is cancelled."""
        with self._changed:
            for request in generation.requests:
                self.scheduler.cancel(request)
            if self.config.free_when_idle and self.idle:
                self.runner.release()

    @staticmethod
    def _remaining(iteration: Iteration) -> int:
        """Iterations that will follow, if no row ends early."""
        requests = [step.request for step in iteration.steps]
        return max(request.max_new_tokens - len(request.generated) for request in requests)
