"""The paper's baseline: the same engine, but scheduling by request, as FasterTransformer and Triton do it.

A batch starts together and nobody joins it. Rows that have ended are computed along, as inactive ones, and all answers
go out when the longest is done.
"""

from collections.abc import Iterable
from typing import Any

from orca_hf.config import OrcaConfig
from orca_hf.engines import Engine
from orca_hf.generate import OrcaGenerate
from orca_hf.kv_manager import KVManager
from orca_hf.request import Request, RequestState
from orca_hf.runner import ModelRunner
from orca_hf.sampling import Generation
from orca_hf.scheduler import Iteration, Scheduler, Step


class RequestLevelScheduler(Scheduler):
    """Admits requests when there are none, and ends them together: see `Scheduler` for what else it does."""

    def __init__(self, kv_manager: KVManager, **limits: Any) -> None:
        super().__init__(kv_manager, **limits)
        self._open = True  # whether the batch is being put together
        self._inactive: dict[int, Request] = {}  # those of the batch that have ended

    def schedule(self) -> Iteration | None:
        """As Orca does, but with nobody new beside those that run, and with those that have ended."""
        self._open = not self._admitted
        iteration = super().schedule()
        if iteration is None:
            return None
        inactive = [self._inactive_step(request) for request in self._inactive.values()]
        return Iteration(tuple(sorted([*iteration.steps, *inactive], key=lambda step: step.request.request_id)))

    def finish(self, request: Request) -> None:
        """Have `request` end with its batch."""
        self._inactive[request.request_id] = request
        self._end_batch()

    def _runnable(self) -> list[tuple[Request, int]]:
        return [found for found in super()._runnable() if found[0].request_id not in self._inactive]

    def _admit(self) -> Request | None:
        return super()._admit() if self._open else None

    @staticmethod
    def _inactive_step(request: Request) -> Step:
        request.state = RequestState.IN_FLIGHT
        # Its last computed token once more: there is no slot for another.
        return Step(request, request.computed - 1, 1, samples=False)

    def cancel(self, request: Request) -> None:
        """As Orca does; the others of its batch go if they only waited for it."""
        super().cancel(request)
        self._end_batch()

    def _land(self, requests: Iterable[Request]) -> None:
        super()._land(requests)
        self._end_batch()

    def _end(self, request: Request, state: RequestState) -> None:
        self._inactive.pop(request.request_id, None)
        super()._end(request, state)

    def _end_batch(self) -> None:
        if self._num_in_flight == 0 and len(self._inactive) == len(self._admitted):
            for request in list(self._inactive.values()):
                self._end(request, RequestState.FINISHED)


class RequestLevelEngine(Engine):
    """An engine that answers a batch as a whole."""

    scheduler_type = RequestLevelScheduler

    def __init__(self, runner: ModelRunner, config: OrcaConfig) -> None:
        self._unanswered: list[Request] = []
        super().__init__(runner, config)

    def _end_row(self, request: Request) -> None:
        self._unanswered.append(request)
        self.scheduler.finish(request)
        self._answer_batch()

    def _fail(self, generation: Generation, error: BaseException) -> None:
        super()._fail(generation, error)
        self._answer_batch()

    def _answer_batch(self) -> None:
        if self.scheduler.num_admitted == 0:
            while self._unanswered:
                self._unanswered.pop().owner.row_ended()


class RequestLevelGenerate(OrcaGenerate):
    """A model's generate(), run by request-level scheduling."""

    engine_type = RequestLevelEngine
