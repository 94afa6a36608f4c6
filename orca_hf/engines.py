"""The engine: owns scheduler and runner, and lets the threads that wait for an answer drive it.

There is no background thread. A thread whose call is unfinished and that finds nobody driving runs iterations, for
everybody; the others wait. When the driver's own call is done, a waiting thread takes over. So any number of threads
share one batch, and nothing outlives their calls.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from traceback import clear_frames
from typing import TYPE_CHECKING, TypeVar

from orca_hf.backoff import Backoff
from orca_hf.calls import Calls
from orca_hf.config import OrcaConfig
from orca_hf.errors import ForwardError, OrcaError, UnsupportedError
from orca_hf.interruption import ChangeLock, always, let_go, outermost
from orca_hf.kv_manager import KVManager
from orca_hf.outcome import Outcome
from orca_hf.request import Request, RequestState
from orca_hf.runner import ModelRunner, ThreadModes
from orca_hf.sampling import Accepted, Generation
from orca_hf.scheduler import Iteration, Scheduler, Step
from orca_hf.speculation import Speculation
from orca_hf.trial import try_out
from orca_hf.work import EngineStats, Work

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

T = TypeVar("T")
# Seconds after which a thread that waits looks whether the one that drives is still there.
PATIENCE_S = 1.0


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
        modes = runner.thread_modes()
        outermost(lambda: always(lambda: try_out(runner), lambda: runner.restore(modes)), runner.locks)
        self.work = Work()
        self._speculation = Speculation(config.num_speculative_tokens)
        self.clock: Callable[[], float] = time.monotonic
        self.scheduler = self._make_scheduler()
        self._backoff = Backoff(self.scheduler)
        self._state = ChangeLock()  # around all that follows; notified when a driver stops, or work comes
        self._driver: int | None = None  # the driving thread
        self._is_servant = False  # whether that thread is none of the user's
        self._calls = Calls()
        self._in_flight: Iteration | None = None
        self._halves: deque[Iteration] = deque()  # of iterations that failed, to run before anything else
        # Sampling steps by their first row of logits, not handed out yet.
        self._pending: dict[Generation, dict[int, Step]] = {}
        self._turn: Generation | None = None  # whose logits are being handed out
        self._is_stepping = False  # the driver is within an iteration
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
        stats = self._outermost(self._look)
        if not self.is_driven:
            self._tell_ended()
        return stats

    def _look(self) -> EngineStats:
        with self._state:
            self._mend()
            self._drop_unwanted()
            kv, graphs = self.scheduler.kv_manager, self.runner.graphs
            return EngineStats(
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

    @property
    def idle(self) -> bool:
        """Whether nobody waits for anything."""
        return self._outermost(self._is_idle)

    def _is_idle(self) -> bool:
        with self._state:
            self._mend()
            self._drop_unwanted()
            return self.scheduler.idle and self._driver is None

    @property
    def is_driven(self) -> bool:
        """Whether a thread runs iterations now; without the lock."""
        return self._driver is not None

    @property
    def driven_by_this_thread(self) -> bool:
        """Whether the caller is inside an iteration: a processor, criterion, streamer or hook that calls back.

        Or a signal's handler, which runs anywhere, within a change too.
        """
        if self._state.is_mine:
            return True
        thread = threading.get_ident()
        return self._driver == thread and self._is_driving(thread)

    def fits_at_once(self, prompt_lens: Sequence[int], max_new_tokens: int) -> bool:
        """Whether all rows of a call could hold their slots at the same time.

        Raises:
            CapacityError: One of the rows could never hold its slots, not even alone.
        """
        if not self.runner.pool.layers:
            self._outermost(self._look_at_memory)
        kv = self.scheduler.kv_manager
        for prompt_len in prompt_lens:
            kv.check_fits(prompt_len, max_new_tokens)
        return sum(kv.blocks_for(prompt_len + max_new_tokens - 1) for prompt_len in prompt_lens) <= kv.num_blocks

    def _look_at_memory(self) -> None:
        """Size the pool anew: its memory was given back, and may have become scarce since."""
        with self._state:
            if self._is_idle() and not self.runner.pool.layers:
                self._replace_scheduler(self._make_scheduler())

    def run(self, generation: Generation) -> None:
        """Serve one call to its end, driving or waiting.

        Raises:
            BaseException: Whatever ended the call, or interrupted it; its slots are back.
        """
        self._outermost(lambda: always(lambda: self._run(generation), lambda: self._end(generation)))
        if generation.error is not None:
            raise generation.error

    def _run(self, generation: Generation) -> None:
        try:
            self.submit(generation)
            while not generation.done:
                if not self.drive(lambda: generation.done):
                    self._wait_for(generation)
        except BaseException as error:
            # This thread's own interruption (Ctrl-C), or a defect of the engine: either way the call is over.
            generation.fail(error)
            raise

    def submit(self, generation: Generation, *, check_weights: bool = True) -> None:
        """Take a call in; whoever drives serves it.

        Args:
            generation: The call.
            check_weights: Where others run already, compare packed weights with the model's before this call runs.

        Raises:
            CapacityError: One of its rows could never hold its slots.
        """
        self._outermost(lambda: self._submit(generation, check_weights))

    def _submit(self, generation: Generation, check_weights: bool) -> None:
        with self._state:
            self._mend()
            for request in generation.requests:
                # Another call may have found less memory since this one was judged.
                self.scheduler.kv_manager.check_fits(len(request.prompt), request.max_new_tokens)
            if self.scheduler.idle:
                self.runner.start()
            elif check_weights:
                self.runner.distrust()
            self._calls.enter(generation)
            for request in generation.requests:
                self.scheduler.submit(request)
            if generation.listener is not None:
                self._state.notify_all()  # nobody waits for it in here, but a thread may wait for work

    def drive(self, until: Callable[[], bool], *, is_servant: bool = False) -> bool:
        """Run iterations for everybody, until `until()` or nothing is left.

        Args:
            until: Asked between iterations, without the lock.
            is_servant: The thread is none of the user's, so that no Ctrl-C comes to it.

        Returns:
            False if there was nothing to do, or another thread drives.
        """
        modes = self.runner.thread_modes()
        return self._outermost(lambda: always(lambda: self._drive(until, is_servant), lambda: self._leave_wheel(modes)))

    def _drive(self, until: Callable[[], bool], is_servant: bool) -> bool:
        with self._state:
            self._mend()
            if self._driver is not None or self.scheduler.idle:
                return False
            self._is_servant = is_servant
            self._driver = threading.get_ident()
        while not (until() or self._has_no_work()):
            self._run_one_iteration()
        return True

    def serve(self, *, stays: Callable[[], bool], may_end: Callable[[], bool]) -> None:
        """Drive whenever there is work and nobody else does.

        Args:
            stays: Whether to wait for more when no submitted call is left; `notice` has it asked again.
            may_end: Asked with the lock held when none is left; the end if so.
        """
        while True:
            with self._state:
                while True:
                    self._mend()
                    self._drop_unwanted()
                    if not self._calls.has_submitted and may_end():
                        return
                    if self._calls.ended or (self._driver is None and not self.scheduler.idle):
                        break
                    self._state.wait(None if self._driver is None else PATIENCE_S)
                    self.look_after_driver()
            self._tell_ended()
            self.drive(lambda: not (self._calls.has_submitted or stays()), is_servant=True)

    def notice(self) -> None:
        """Have waiting threads look again."""
        with self._state:
            self._state.notify_all()

    def cancel(self, generation: Generation, error: BaseException) -> None:
        """End a submitted call with `error`, if it is not done; its slots are back when its iteration is."""
        self._outermost(lambda: self._cancel(generation, error))
        if not self.is_driven:
            self._tell_ended()

    def _cancel(self, generation: Generation, error: BaseException) -> None:
        with self._state:
            self._mend()
            if not generation.done:
                self._fail(generation, error)

    def abandon(self, generation: Generation) -> None:
        """Have a call cancelled by the next who looks. Takes no lock: the garbage collector may call it anywhere."""
        self._calls.abandon(generation)

    def fail_submitted(self, error: BaseException) -> None:
        """End every call that no thread waits for in here: nobody is left to serve them."""
        with self._state:
            self._mend()
            for generation in self._calls:
                if generation.listener is not None:
                    self._fail(generation, error)
        self._tell_ended()

    def release(self) -> bool:
        """Give K/V memory and packed weights back, if the engine is idle.

        Returns:
            Whether it was.
        """
        return self._outermost(self._release)

    def _release(self) -> bool:
        with self._state:
            if not self._is_idle():
                return False
            self.runner.release()
            return True

    def _outermost(self, work: Callable[[], T]) -> T:
        """`work()`, and this thread holds no lock after it, wherever an interruption comes."""
        return outermost(work, (self._state.lock, *self.work.locks, *self.runner.locks))

    def _wait_for(self, generation: Generation) -> None:
        """Wait for the end of a call that another thread serves, or of that thread's driving."""
        with self._state:
            while not generation.done and self._driver is not None:
                self._state.wait(PATIENCE_S)
                self.look_after_driver()

    def _leave_wheel(self, modes: ThreadModes) -> None:
        """The calling thread drives no more, however it came here; may be called again."""
        if self._driver == threading.get_ident():
            self._stop_driving(modes)
        if not self.is_driven:
            self._wake_waiters()
            self._tell_ended()

    def _wake_waiters(self) -> None:
        with self._state:
            self._state.notify_all()
            for generation in self._calls:
                if generation.listener is not None:
                    generation.listener.wake()

    def _stop_driving(self, modes: ThreadModes) -> None:
        let_go((self._state.lock,))
        self.runner.leave_cores()
        self.runner.restore(modes)
        with self._state:
            for generation in (*self._calls, *self._calls.ended):
                if generation.listener is not None:
                    generation.listener.let_go()
            self._is_stepping = False
            self._mend()
            if self.config.free_when_idle and self.scheduler.idle:
                self.runner.release()
            self._is_servant = False
            self._driver = None

    def look_after_driver(self) -> None:
        """Take the wheel from a thread that left without giving it back, interrupted again and again."""
        with self._state:
            if self._driver is not None and not self._is_driving(self._driver):
                self.runner.take_over()
                self._is_stepping = False
                self._driver = None
                self._state.is_cut = True

    def _is_driving(self, thread: int) -> bool:
        """Whether a thread is inside `drive`, by its stack: what it noted of itself may be out of date."""
        frame = sys._current_frames().get(thread)
        while frame is not None:
            if frame.f_code is Engine.drive.__code__ and frame.f_locals.get("self") is self:
                return True
            frame = frame.f_back
        return False

    def _has_no_work(self) -> bool:
        with self._state:
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
            with self._state:
                if not ended:
                    return
                generation = ended[0]
            assert generation.listener is not None
            generation.listener.ended()  # it stays until it has been told, whatever interrupts
            with self._state:
                self._calls.told(generation)

    def _mend(self) -> None:
        """Begin anew where an interruption cut something off; the lock is held.

        Not while an iteration runs for the requests as they are: whoever runs it looks when it has returned.
        """
        if self._driver is not None and (self._driver != threading.get_ident() or self._is_stepping):
            return
        if self._state.is_cut or self._in_flight is not None or self._pending:
            self._begin_anew()

    def _begin_anew(self) -> None:
        """Make scheduler and ledger from what is certain, the calls and their tokens; the lock is held.

        K/V are computed again. Whose turn it was to take tokens cannot be asked again, unless it is a plain choice.
        """
        turn = self._turn
        if turn is not None and not turn.done and not turn.can_repeat:
            turn.fail(OrcaError("The thread that ran this call's iteration was interrupted."))
        self._turn = self._in_flight = None
        self._pending = {}
        self._halves.clear()
        self._replace_scheduler(self._scheduler_of(self.scheduler.kv_manager.num_slots))
        for generation in self._calls:
            for request in generation.begin_anew():
                self.scheduler.submit(request)
            if generation.listener is not None and generation.can_repeat:
                generation.listener.catch_up(generation.requests[0].generated)
            if generation.done:
                self._leave(generation)
        self._state.is_cut = False

    def _run_one_iteration(self) -> None:
        self._is_stepping = False
        with self._state:
            self._mend()
            self._is_stepping = True
            self._drop_unwanted()
            if self.scheduler.idle:
                return
            iteration = self._in_flight = self._next_iteration()
            if iteration is None:
                state = f"{self.scheduler.num_waiting} waiting, {self.scheduler.num_admitted} admitted"
                for generation in self._calls:
                    self._fail(generation, _defect(f"unfinished requests and none that can run: {state}"))
                return
        began = self.clock()
        try:
            logits = self.runner.run(iteration, self._remaining(iteration))
        except Exception as error:  # noqa: BLE001
            self._forward_failed(iteration, error)
            self._tell_ended()
            return
        with self._state:
            if self._state.is_cut:  # another thread's change: the ledger says nothing about this iteration any more
                self._begin_anew()
                return
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
        self._is_stepping = False
        self._tell_ended()

    def _next_iteration(self) -> Iteration | None:
        """What is left of one that failed, or what the scheduler chooses; in flight. The lock is held."""
        while self._halves:
            if (iteration := self.scheduler.resume(self._halves.popleft())) is not None:
                return iteration
        iteration = self.scheduler.schedule()
        if iteration is None:
            return None
        return self._speculation.extend(
            iteration, pays=self.runner.has_cheap_rows, max_tokens=self.scheduler.max_batch_tokens
        )

    def _forward_failed(self, iteration: Iteration, error: Exception) -> None:
        with self._state:
            if self._state.is_cut:
                self._begin_anew()
                return
            self.scheduler.abandon(iteration)
            self._in_flight = None
            if self.runner.ran_out_of_memory(error) and self._backoff.shrink(iteration):
                return  # fewer of them run next
            calls: list[Generation] = list({step.request.owner: None for step in iteration.steps})
            if len(calls) == 1:
                self._fail(calls[0], _as_seen_by(calls[0], error))
            else:
                # No row can be told from the others, so they run again, in halves: who fails alone is at fault.
                middle = len(calls) // 2
                for half in (calls[middle:], calls[:middle]):  # the earlier half comes to stand in front
                    steps = tuple(step for step in iteration.steps if step.request.owner in half)
                    self._halves.appendleft(Iteration(steps))
            if faults := self.scheduler.faults():
                logger.error(
                    "The ledger contradicts itself, and is made anew. Please report it: %s.", "; ".join(faults)
                )
                self._begin_anew()

    def _hand_out(self, logits: Tensor) -> None:
        """Gives each call the logits of its rows; what it makes of them is its own affair, errors included."""
        outcome = Outcome(logits, self._pending, self._speculation, self.work)
        while self._pending:
            generation, steps = next(iter(self._pending.items()))
            self._turn = generation
            try:
                self._append(generation, outcome.accept(generation, steps))
            except BaseException as error:
                # A user's processor, criterion or streamer raised: its own call ends with it, no other. In a user's
                # thread it may also be that thread's interruption.
                if not (isinstance(error, Exception) or self._is_servant):
                    raise
                with self._state:
                    self._fail(generation, error)
                    self._turn = None
            self._pending.pop(generation, None)
            if generation.runs_users_code:
                self.runner.distrust()

    def _append(self, generation: Generation, accepted: list[Accepted]) -> None:
        with self._state:
            if generation.options.output_cache and accepted and all(over for _, _, over in accepted):
                length = generation.prompt_len + len(generation.requests[0].generated)
                generation.kv_states = self.runner.read_kv(generation.requests, length)
            self.work.add_tokens(sum(len(tokens) for _, tokens, _ in accepted))
            for request, tokens, over in accepted:
                if request.finished:
                    continue  # cancelled in the meantime
                if self._state.is_cut:
                    request.generated += tokens  # the ledger is made anew below
                    request.state = RequestState.FINISHED if over else request.state
                    continue
                self.scheduler.append(request, tokens)
                if over:
                    self._end_row(request)
                if generation.listener is not None:
                    generation.listener.catch_up(request.generated)
            if generation.done:
                self._leave(generation)
            self._turn = None
            if self._state.is_cut:
                self._begin_anew()

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
            self._state.notify_all()  # its thread waits in here
        elif generation.streamer is None:
            generation.listener.ended()
            self._calls.told(generation)

    def _end(self, generation: Generation) -> None:
        """A call's thread leaves: whatever of it is not over is cancelled; may be called again."""
        let_go((self._state.lock,))
        with self._state:
            self._mend()
            if self._calls.leave(generation):
                for request in generation.requests:
                    self.scheduler.cancel(request)
            if self.config.free_when_idle and self._is_idle():
                self.runner.release()

    @staticmethod
    def _remaining(iteration: Iteration) -> int:
        """Iterations that will follow, if no row ends early."""
        requests = [step.request for step in iteration.steps]
        return max(request.max_new_tokens - len(request.generated) for request in requests)


def _as_seen_by(generation: Generation, error: Exception) -> Exception:
    """The error of a forward as it is told to who waits for a call: as natively, or to a handle that may be kept."""
    if generation.listener is None or isinstance(error, UnsupportedError):
        return error
    failed = ForwardError(f"The model's forward raised {type(error).__name__}: {error}")
    failed.__cause__ = error
    clear_frames(error.__traceback__)  # they hold a forward's tensors, and a handle may be kept
    return failed


def _defect(what: str) -> OrcaError:
    return OrcaError(f"The engine's state contradicts itself; this is a defect of orca_hf, please report it: {what}.")
