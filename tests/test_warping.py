"""Promise: sampled calls that share an iteration draw what each draws alone, however alike their settings are."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tiny import PROMPTS, make_model
from transformers import LogitsProcessorList
from transformers.generation import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

import orca_hf
from orca_hf.random_state import seeded
from orca_hf.warping import RowProbabilities, faster
from orca_kernels import compiled

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
        assert torch.equal(together.take(row, warpers(kind), CPU), alone(logits[row], warpers(kind)))


@pytest.fixture(scope="module")
def kernels() -> compiled.Library:
    found = compiled.library()  # the first packed weights of a process do that
    if found is None:
        pytest.skip("the kernels cannot be compiled on this machine")
    return found


def as_a_model_makes_them(num_rows: int = 3) -> torch.Tensor:
    """Scores of which few have most of the probability."""
    scores = torch.randn(num_rows, 5000) * 2
    scores[:, torch.randperm(5000)[:60]] += torch.linspace(2, 12, 60)
    return scores


def with_one(value: float) -> torch.Tensor:
    scores = torch.randn(3, 70)
    scores[1, 7] = value
    return scores


SCORES = {
    "as a model makes them": as_a_model_makes_them,
    "random": lambda: torch.randn(3, 5000) * 4,
    "rounded": lambda: (torch.randn(3, 5000) * 4).bfloat16().float(),
    "all alike": lambda: torch.ones(3, 70),
    "after top-k": lambda: TopKLogitsWarper(20)(None, torch.randn(3, 5000)),
    "zeros of both signs": lambda: torch.cat([torch.zeros(3, 20), -torch.zeros(3, 20), torch.randn(3, 20)], dim=1),
    "a NaN": lambda: with_one(float("nan")),
    "infinite": lambda: with_one(float("inf")),
    "nothing": lambda: torch.full((2, 70), -float("inf")),
    "one token": lambda: torch.randn(4, 1),
}


@pytest.mark.parametrize("top_p", [0.0, 0.01, 0.5, 0.9, 0.9999, 1.0])
@pytest.mark.parametrize("kind", SCORES)
def test_top_p_is_transformers_own_to_the_last_bit(kernels: compiled.Library, kind: str, top_p: float) -> None:
    torch.manual_seed(0)
    scores = SCORES[kind]()
    before = scores.clone()
    for settings in ({}, {"min_tokens_to_keep": 7}, {"min_tokens_to_keep": 10**6}, {"filter_value": -3.0}):
        warper = TopPLogitsWarper(top_p, **settings)
        assert faster(warper) is not warper, "this release's warper is not the one that is known"
        torch.testing.assert_close(faster(warper)(None, scores), warper(None, scores), rtol=0, atol=0, equal_nan=True)
        assert torch.equal(scores.nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.97])
def test_the_kernel_leaves_few_rows_to_transformers(kernels: compiled.Library, top_p: float) -> None:
    torch.manual_seed(0)
    scores = as_a_model_makes_them(500)
    kept, is_done = kernels.top_p(scores, top_p, min_tokens_to_keep=1, filter_value=-float("inf"))
    assert is_done.sum() > 450
    assert torch.equal(kept[is_done], TopPLogitsWarper(top_p)(None, scores)[is_done])


def test_a_warper_of_the_users_is_left_alone() -> None:
    class Mine(TopPLogitsWarper):
        pass

    mine = Mine(0.9)
    assert faster(mine) is mine


def test_what_someone_puts_in_transformers_place_runs(
    kernels: compiled.Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    warper = TopPLogitsWarper(0.9)
    assert faster(warper) is not warper
    monkeypatch.setattr(TopPLogitsWarper, "__call__", lambda self, input_ids, scores: scores)
    assert faster(warper) is warper


def test_a_row_that_nobody_announced_is_made_alone() -> None:
    logits = torch.randn(3, 97, generator=torch.Generator().manual_seed(0))
    together = RowProbabilities(logits)
    together.want([0], warpers(), CPU)
    for row in (0, 2, 1):
        assert torch.equal(together.take(row, warpers(), CPU), alone(logits[row], warpers()))


def test_a_warper_that_is_changed_between_steps_is_no_longer_alike() -> None:
    logits = torch.randn(2, 97, generator=torch.Generator().manual_seed(0))
    mine, theirs = warpers(), warpers()
    mine[1].top_k = 3
    together = RowProbabilities(logits)
    together.want([0], mine, CPU)
    together.want([1], theirs, CPU)
    assert int((together.take(0, mine, CPU) > 0).sum()) <= 3
    assert torch.equal(together.take(1, theirs, CPU), alone(logits[1], theirs))


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
