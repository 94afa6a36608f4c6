"""The paper's baseline: the same engine, but scheduling by request, as FasterTransformer and Triton do it.

A batch starts together; nobody joins it; its answers go out when the longest is done. Rows that ended before are not
computed on, so the comparison with Orca is about scheduling alone, and is kind to the baseline.
"""

from orca_hf.config import OrcaConfig
from orca_hf.engines import Engine
from orca_hf.generate import OrcaGenerate
from orca_hf.request import Request
from orca_hf.runner import ModelRunner
from orca_hf.scheduler import Iteration, Scheduler


class RequestLevelScheduler(Scheduler):
    """Admits requests only when there are none: see `Scheduler` for what else it does."""

    _open = True  # whether the batch is being put together

    def schedule(self) -> Iteration | None:
        """As Orca does, but with nobody new beside those that run."""
        self._open = not self._admitted
        return super().schedule()

    def _admit(self) -> Request | None:
        return super()._admit() if self._open else None


class RequestLevelEngine(Engine):
    """An engine that answers a batch as a whole."""

    scheduler_type = RequestLevelScheduler

    def __init__(self, runner: ModelRunner, config: OrcaConfig) -> None:
        self._unanswered: list[Request] = []
        super().__init__(runner, config)

    def _end_row(self, request: Request) -> None:
        self.scheduler.finish(request)
        self._unanswered.append(request)
        if self.scheduler.num_admitted == 0:
            while self._unanswered:
                self._unanswered.pop().owner.row_ended()


class RequestLevelGenerate(OrcaGenerate):
    """A model's generate(), run by request-level scheduling."""

    engine_type = RequestLevelEngine
