"""Calls from threads that are sure to share iterations."""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import torch
from tiny import PROMPTS
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel


class Gate(LogitsProcessor):
    """Lets a test act while its call is in the middle of an iteration, and raises what it is told to."""

    def __init__(self, after: int, action: Callable[[], None]) -> None:
        self.after = after
        self.action = action
        self.seen = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        if self.seen > self.after:
            self.action()
        return scores


def gated_call(model: PreTrainedModel, num_rows: int, driving: Event) -> dict[str, Any]:
    """A call that sets `driving` once it drives, and goes on only when `num_rows` rows of others have come."""
    scheduler = model.generate.engines[0].scheduler
    enough = scheduler._next_id + 1 + num_rows
    deadline = time.monotonic() + 60

    def wait_for_all() -> None:
        driving.set()
        while scheduler._next_id < enough:
            assert time.monotonic() < deadline, "the other calls did not arrive"
            os.sched_yield()

    return {
        "input_ids": torch.tensor([PROMPTS[0]]),
        "max_new_tokens": 24,
        "do_sample": False,
        "logits_processor": LogitsProcessorList([Gate(0, wait_for_all)]),
    }


def joined_calls(model: PreTrainedModel, calls: list[dict[str, Any]], num_rows: int | None = None) -> list[Any]:
    """Runs the calls in threads that share iterations: one more, the first, drives, and waits until all have come.

    Args:
        model: A wrapped model that has run once.
        calls: Arguments of generate(), of `num_rows` rows together; one each if None.

    Returns:
        Each call's result or exception, that of the first before them.
    """

    def run(kwargs: dict[str, Any]) -> Any:
        try:
            return model.generate(**kwargs)
        except BaseException as error:
            return error

    driving = Event()
    first = gated_call(model, len(calls) if num_rows is None else num_rows, driving)
    with ThreadPoolExecutor(1 + len(calls)) as threads:
        futures = [threads.submit(run, first)]
        assert driving.wait(60)
        futures += [threads.submit(run, kwargs) for kwargs in calls]
        return [future.result(timeout=60) for future in futures]
