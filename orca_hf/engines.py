"""The engine: owns scheduler and runner, and lets the threads that wait for an answer drive it.

There is no background thread. A thread whose call is unfinished and that finds nobody driving runs iterations, for
everybody; the others wait. When the driver's own call is done, a waiting thread takes over. So any number of threads
share one batch, and nothing outlives their calls.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from traceback import clear_frames
from typing import TYPE_CHECKING

from orca_hf.backoff import Backoff
from orca_hf.calls import Calls
from orca_hf.config import OrcaConfig
from orca_hf.errors import ForwardError, OrcaError, UnsupportedError
from orca_hf.kv_manager import KVManager
from orca_hf.outcome import Outcome
from orca_hf.request import Request
from orca_hf.runner import ModelRunner
from orca_hf.sampling import Accepted, Generation
from orca_hf.scheduler import Iteration, Scheduler, Step
from orca_hf.speculation import Speculation
from orca_hf.trial import try_out
from orca_hf.work import EngineStats, Work

if TYPE_CHECKING:
    from torch import Tensor


class Engine:
    """Serves generate() calls of many threads on one model.

    Args:
        runner: Runs the iterations; its pool is made here.
        config: The settings.

    Attributes:
        work: Where its iterations are counted; engines of one model share one.
        clock: Seconds that never go back.

    Raises:
        UnsupportedError: The runner cannot run its model.
        CapacityError: There is no memory for a pool.
    """

    scheduler_type: type[Scheduler] = Scheduler  # the bench compares with another policy, in a subclass

    def __init__(self, runner: ModelRunner, config: OrcaConfig) -> None:
        self.runner = runner
        self.config = config
        try_out(runner)
        self.work = Work()
        self._speculation = Speculation(config.num_speculative_tokens)
        self.clock: Callable[[], float] = time.monotonic
        self.scheduler = self._make_scheduler()
        self._backoff = Backoff(self.scheduler)
        self._changed = threading.Condition()  # guards the scheduler; notified when a driver stops, or work comes
        self._driver: int | None = None  # the driving thread
        self._is_servant = False  # whether that thread is none of the user's
        self._calls = Calls()
        self._in_flight: Iteration | None = None
        # Sampling steps by their first row of logits, not handed out yet.
        self._pending: dict[Generation, dict[int, Step]] = {}
        self._num_iterations = 0
        self._num_tokens = 0

    def _make_scheduler(self) -> Scheduler:
        return self._scheduler_of(self.runner.make_pool())

    def _scheduler_of(self, num_slots: int) -> Scheduler:
        return self.scheduler_type(
            KVManager(num_slots, self.config.block_size),
            max_batch_size=self.config.max_batch_size,
            max_batch_tokens=self.config.max_batch_tokens,
        )

    def _replace_scheduler(self, scheduler: Scheduler) -> None:
        scheduler.number_on(self.scheduler)
        self.scheduler = scheduler
        self._backoff = Backoff(scheduler)

    @property
    def stats(self) -> EngineStats:
        """A consistent picture of the engine."""
        with self._changed:
            self._drop_unwanted()
            kv, graphs = self.scheduler.kv_manager, self.runner.graphs
            stats = EngineStats(
                num_waiting=self.scheduler.num_waiting,
                num_admitted=self.scheduler.num_admitted,
                num_slots=kv.num_slots,
                num_reserved=kv.num_reserved,
                num_used=self.scheduler.num_used,
                num_iterations=self._num_iterations,
                num_tokens=self._num_tokens,
                kv_bytes=self.runner.pool.num_bytes,
                packed_bytes=self.runner.packed.num_bytes,
                num_graphs=0 if graphs is None else len(graphs),
                no_graphs=None if graphs is None else graphs.given_up,
            )
            is_driven = self._driver is not None
        if not is_driven:
            self._tell_ended()
        return stats

    @property
    def idle(self) -> bool:
        """Whether nobody waits for anything."""
        with self._changed:
            self._drop_unwanted()
            return self.scheduler.idle and self._driver is None

    @property
    def is_driven(self) -> bool:
        """Whether a thread runs iterations now; without the lock."""
        return self._driver is not None

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
                self._replace_scheduler(self._make_scheduler())
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
            self.submit(generation)
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

    def submit(self, generation: Generation) -> None:
        """Take a call in; whoever drives serves it.

        Raises:
            CapacityError: One of its rows could never hold its slots.
        """
        with self._changed:
            if self.scheduler.idle:
                self.runner.start()
            for request in generation.requests:
                # Another call may have found less memory since this one was judged.
                self.scheduler.kv_manager.check_fits(len(request.prompt), request.max_new_tokens)
            for request in generation.requests:
                self.scheduler.submit(request)
            self._calls.enter(generation)
            if generation.listener is not None:
                self._changed.notify_all()  # nobody waits for it in here, but a thread may wait for work

    def drive(self, until: Callable[[], bool], *, is_servant: bool = False) -> bool:
        """Run iterations for everybody, until `until()` or nothing is left.

        Args:
            until: Asked between iterations, without the lock.
            is_servant: The thread is none of the user's, so that no Ctrl-C comes to it.

        Returns:
            False if there was nothing to do, or another thread drives.
        """
        with self._changed:
            if self._driver is not None or self.scheduler.idle:
                return False
            self._driver = threading.get_ident()
            self._is_servant = is_servant
        try:
            while not (until() or self._has_no_work()):
                self._run_one_iteration()
        finally:
            self.runner.leave_cores()
            self._stop_driving()
        return True

    def serve(self, *, stays: Callable[[], bool], may_end: Callable[[], bool]) -> None:
        """Drive whenever there is work and nobody else does.

        Args:
            stays: Whether to wait for more when no submitted call is left; `notice` has it asked again.
            may_end: Asked with the lock held when none is left; the end if so.
        """
        while True:
            with self._changed:
                while True:
                    self._drop_unwanted()
                    if self._calls.num_submitted == 0 and may_end():
                        return
                    if self._calls.ended or (self._driver is None and not self.scheduler.idle):
                        break
                    self._changed.wait()
            self._tell_ended()
            self.drive(lambda: self._calls.num_submitted == 0 and not stays(), is_servant=True)

    def notice(self) -> None:
        """Have waiting threads look again."""
        with self._changed:
            self._changed.notify_all()

    def cancel(self, generation: Generation, error: BaseException) -> None:
        """End a submitted call with `error`, if it is not done; its slots are back when its iteration is."""
        with self._changed:
            if not generation.done:
                self._fail(generation, error)
            is_driven = self._driver is not None
        if not is_driven:
            self._tell_ended()

    def abandon(self, generation: Generation) -> None:
        """Have a call cancelled by the next who looks. Takes no lock: the garbage collector may call it anywhere."""
        self._calls.abandon(generation)

    def fail_submitted(self, error: BaseException) -> None:
        """End every call that no thread waits for in here: nobody is left to serve them."""
        with self._changed:
            for generation in self._calls:
                if generation.listener is not None:
                    self._fail(generation, error)
        self._tell_ended()

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
            self._is_servant = False
            self._changed.notify_all()
            for generation in self._calls:
                if generation.listener is not None:
                    generation.listener.wake()
            if self.config.free_when_idle and self.scheduler.idle:
                self.runner.release()
        self._tell_ended()

    def _has_no_work(self) -> bool:
        with self._changed:
            self._drop_unwanted()
            return self.scheduler.idle

    def _drop_unwanted(self) -> None:
        """End calls that nobody wants any more, or whose time is over; the lock is held."""
        for generation, error in self._calls.unwanted(self.clock()):
            self._fail(generation, error)

    def _tell_ended(self) -> None:
        """Tell listeners, whose streamers run a user's code, that their calls are done; without the lock."""
        ended = self._calls.ended
        while ended:
            with self._changed:
                if not ended:
                    return
                generation = ended[0]
            assert generation.listener is not None
            generation.listener.ended()  # it stays until it has been told, whatever interrupts
            with self._changed:
                if ended and ended[0] is generation:
                    ended.popleft()

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
        self._check()

    def _check(self) -> None:
        """Begin anew with an empty ledger should this one contradict itself; the lock is held."""
        if faults := self.scheduler.faults():
            for generation in self._calls:
                self._fail(generation, _defect("; ".join(faults)))
            kv = self.scheduler.kv_manager
            self._replace_scheduler(self._scheduler_of(kv.num_slots))

    def _run_one_iteration(self) -> None:
        with self._changed:
            self._drop_unwanted()
            if self.scheduler.idle:
                return
            iteration = self._in_flight = self.scheduler.schedule()
            if iteration is None:
                state = f"{self.scheduler.num_waiting} waiting, {self.scheduler.num_admitted} admitted"
                for generation in self._calls:
                    self._fail(generation, _defect(f"unfinished requests and none that can run: {state}"))
                return
            iteration = self._in_flight = self._speculation.extend(
                iteration, pays=self.runner.has_cheap_rows, max_tokens=self.scheduler.max_batch_tokens
            )
        began = self.clock()
        try:
            logits = self.runner.run(iteration, self._remaining(iteration))
        except Exception as error:  # noqa: BLE001
            self._forward_failed(iteration, error)
            return
        with self._changed:
            row = 0
            for step in iteration.steps:
                if step.samples:
                    self._pending.setdefault(step.request.owner, {})[row] = step
                    row += step.num_samples
            self.scheduler.complete(iteration)
            self._in_flight = None
            self._num_iterations += 1
            self._num_tokens += iteration.num_tokens
            self._backoff.went_well()
        self.work.add_iteration(iteration, began, self.clock() - began)
        self._hand_out(logits)
        self._tell_ended()

    def _forward_failed(self, iteration: Iteration, error: Exception) -> None:
        with self._changed:
            self.scheduler.abandon(iteration)
            self._in_flight = None
            if self.runner.ran_out_of_memory(error) and self._backoff.shrink(iteration):
                return  # fewer of them run next
            # No row of a failed forward can be told from the others, so all calls in it end.
            for generation in {step.request.owner: None for step in iteration.steps}:
                if generation.listener is None or isinstance(error, UnsupportedError):
                    self._fail(generation, error)
                else:
                    failed = ForwardError(f"The model's forward raised {type(error).__name__}: {error}")
                    failed.__cause__ = error
                    clear_frames(error.__traceback__)  # they hold a forward's tensors, and a handle may be kept
                    self._fail(generation, failed)
            self._check()
        self._tell_ended()

    def _hand_out(self, logits: Tensor) -> None:
        """Gives each call the logits of its rows; what it makes of them is its own affair, errors included."""
        outcome = Outcome(logits, self._pending, self._speculation, self.work)
        while self._pending:
            generation, steps = next(iter(self._pending.items()))
            try:
                self._append(generation, outcome.accept(generation, steps))
            except BaseException as error:
                # A user's processor, criterion or streamer raised: its own call ends with it, no other. In a user's
                # thread it may also be that thread's interruption.
                if not (isinstance(error, Exception) or self._is_servant):
                    raise
                with self._changed:
                    self._fail(generation, error)
            del self._pending[generation]

    def _append(self, generation: Generation, accepted: list[Accepted]) -> None:
        with self._changed:
            if generation.options.output_cache and accepted and all(over for _, _, over in accepted):
                generation.kv_states = self.runner.read_kv(generation.requests)
            self.work.add_tokens(sum(len(tokens) for _, tokens, _ in accepted))
            for request, tokens, over in accepted:
                if request.finished:
                    continue  # cancelled in the meantime
                self.scheduler.append(request, tokens)
                if over:
                    self._end_row(request)
                if generation.listener is not None:
                    for token in tokens:
                        generation.listener.token(token)
            if generation.done:
                self._leave(generation)

    def _end_row(self, request: Request) -> None:
        """A row has its last token: its slots are free, and its caller is answered at once; the lock is held."""
        self.scheduler.finish(request)
        request.owner.row_ended()

    def _fail(self, generation: Generation, error: BaseException) -> None:
        """End a call with `error`; the lock is held."""
        generation.fail(error)
        for request in generation.requests:
            self.scheduler.cancel(request)
        self._leave(generation)

    def _leave(self, generation: Generation) -> None:
        """A call is done; the lock is held."""
        if not self._calls.leave(generation):
            return
        if generation.listener is None:
            self._changed.notify_all()  # its thread waits in here
            return
        if generation.streamer is None:
            generation.listener.ended()
        else:
            self._calls.ended.append(generation)

    def _end(self, generation: Generation) -> None:
        """A call's thread leaves: whatever of it is not over is cancelled."""
        with self._changed:
            for request in generation.requests:
                self.scheduler.cancel(request)
            self._calls.leave(generation)
            if self.config.free_when_idle and self.idle:
                self.runner.release()

    @staticmethod
    def _remaining(iteration: Iteration) -> int:
        """Iterations that will follow, if no row ends early."""
        requests = [step.request for step in iteration.steps]
        return max(request.max_new_tokens - len(request.generated) for request in requests)


def _defect(what: str) -> OrcaError:
    return OrcaError(f"The engine's state contradicts itself; this is a defect of orca_hf, please report it: {what}.")
