"""Promise: sampled calls that share an iteration draw what each draws alone, however alike their settings are."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tiny import PROMPTS, make_model
from transformers import LogitsProcessorList
from transformers.generation import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

import orca_hf
from orca_hf.random_state import seeded
from orca_hf.warping import RowProbabilities

CPU = torch.device("cpu")


def warpers(top_k: int = 20) -> LogitsProcessorList:
    return LogitsProcessorList([
        TemperatureLogitsWarper(0.7), TopKLogitsWarper(top_k), TopPLogitsWarper(0.8), MinPLogitsWarper(0.01)
    ])  # fmt: skip


def alone(row: torch.Tensor, processors: LogitsProcessorList) -> torch.Tensor:
    """As the native loop makes them."""
    return processors(None, row[None].to(copy=True, dtype=torch.float32)).softmax(dim=-1)  # type: ignore[arg-type]


# The largest leaves room for fewer rows in a stack than there are; rounded logits have many equals.
@pytest.mark.parametrize("vocab_size", [97, 4096, 70_000])
@pytest.mark.parametrize("rounding", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kinds", [[20] * 9, [20, 5, 20, 5, 5, 20, 7, 20, 5]], ids=["alike", "mixed"])
def test_rows_warped_together_are_the_same_to_the_last_bit(
    vocab_size: int, rounding: torch.dtype | None, kinds: list[int]
) -> None:
    logits = torch.randn(len(kinds), vocab_size, generator=torch.Generator().manual_seed(0)) * 4
    if rounding is not None:
        logits = logits.to(rounding)
    together = RowProbabilities(logits)
    for row, kind in enumerate(kinds):
        together.want([row], warpers(kind), CPU)
    for row, kind in reversed(list(enumerate(kinds))):
        assert torch.equal(together.take(row, warpers(kind)), alone(logits[row], warpers(kind)))


def test_a_warper_that_is_changed_between_steps_is_no_longer_alike() -> None:
    logits = torch.randn(2, 97, generator=torch.Generator().manual_seed(0))
    mine, theirs = warpers(), warpers()
    mine[1].top_k = 3
    together = RowProbabilities(logits)
    together.want([0], mine, CPU)
    together.want([1], theirs, CPU)
    assert int((together.take(0, mine) > 0).sum()) <= 3
    assert torch.equal(together.take(1, theirs), alone(logits[1], theirs))


def test_sampled_calls_of_many_threads_draw_what_each_draws_alone() -> None:
    model = orca_hf.wrap(make_model())
    options = [{"temperature": 0.9}, {"top_p": 0.9}, {"temperature": 0.9, "top_k": 7}, {"min_p": 0.02}]

    def call(index: int) -> list[int]:
        with seeded(index):
            prompt = torch.tensor([PROMPTS[index % len(PROMPTS)]])
            settings = {"do_sample": True, "eos_token_id": [3, 4], **options[index // 5]}
            return model.generate(prompt, max_new_tokens=12, **settings).tolist()

    expected = [call(index) for index in range(20)]
    with ThreadPoolExecutor(20) as threads:
        assert list(threads.map(call, range(20))) == expected
