"""What the scheduler's tests share: how an engine drives a scheduler, in a few lines."""

from __future__ import annotations

from orca_hf.kv_manager import KVManager
from orca_hf.request import Request
from orca_hf.scheduler import Iteration, Scheduler

TOKEN = 7  # what every request "generates": the scheduler never looks at it


def make_scheduler(
    *,
    num_slots: int = 64,
    block_size: int = 1,
    max_batch_size: int = 4,
    max_batch_tokens: int | None = None,
    num_workers: int = 1,
) -> Scheduler:
    return Scheduler(
        KVManager(num_slots, block_size),
        max_batch_size=max_batch_size,
        max_batch_tokens=max_batch_tokens,
        num_workers=num_workers,
    )


def submit(scheduler: Scheduler, prompt_len: int, max_new_tokens: int) -> Request:
    request = Request(range(prompt_len), max_new_tokens)
    scheduler.submit(request)
    return request


def schedule(scheduler: Scheduler) -> Iteration:
    iteration = scheduler.schedule()
    assert iteration is not None
    return iteration


def land(scheduler: Scheduler, iteration: Iteration) -> None:
    """What an engine does with an iteration that ran: one token for each step that samples, and end at the limit."""
    scheduler.complete(iteration)
    for step in iteration.steps:
        if step.samples and not step.request.finished:
            give_token(scheduler, step.request)


def give_token(scheduler: Scheduler, request: Request) -> None:
    scheduler.append(request, [TOKEN])
    if len(request.generated) == request.max_new_tokens:
        scheduler.finish(request)


def run_once(scheduler: Scheduler) -> Iteration:
    iteration = schedule(scheduler)
    land(scheduler, iteration)
    return iteration


def ids(iteration: Iteration | None) -> list[int]:
    return [] if iteration is None else [step.request.request_id for step in iteration.steps]


def spans(iteration: Iteration) -> str:
    """The steps as text: request:start+length, with a ! where a token is sampled."""
    return " ".join(
        f"{step.request.request_id}:{step.start}+{step.length}{'!' if step.samples else ''}" for step in iteration.steps
    )
