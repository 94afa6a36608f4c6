"""Promise: a sampled token is the one that torch.multinomial draws, and the generator goes where it would."""

from __future__ import annotations

import pytest
import torch
from tiny import PROMPTS, make_model

import orca_hf
from orca_hf import multinomial
from orca_kernels import compiled


@pytest.fixture(autouse=True, scope="module")
def kernels() -> compiled.Library:
    found = compiled.library()  # the first packed weights of a process do that
    if found is None:
        pytest.skip("the kernels cannot be compiled on this machine")
    return found


def pair(seed: int) -> tuple[torch.Generator, torch.Generator]:
    return torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("layout", ["rows", "columns", "every other"])
def test_draws_are_multinomials(layout: str, dtype: torch.dtype) -> None:
    probs = torch.rand(6, 800, generator=torch.Generator().manual_seed(0)).to(dtype)
    probs = {"rows": probs, "columns": probs.t().contiguous().t(), "every other": probs[:, ::2]}[layout]
    ours, theirs = pair(7)
    for _ in range(5):
        expected = torch.multinomial(probs, 1, generator=theirs)[:, 0]
        assert torch.equal(multinomial.draw(probs, ours), expected)
        assert torch.equal(ours.get_state(), theirs.get_state())


def test_what_is_no_distribution_gets_pytorchs_error() -> None:
    probs = torch.rand(2, 50)
    probs[1, 3] = float("nan")
    with pytest.raises(RuntimeError, match="probability tensor contains"):
        multinomial.draw(probs, torch.Generator())


def test_a_pytorch_that_draws_otherwise_is_asked_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = compiled.Library.draw
    monkeypatch.setattr(compiled.Library, "draw", lambda self, *of: (kernel(self, *of) + 1) % 50)
    multinomial._draws_alike.cache_clear()
    try:
        ours, theirs = pair(1)
        probs = torch.rand(4, 50)
        assert torch.equal(multinomial.draw(probs, ours), torch.multinomial(probs, 1, generator=theirs)[:, 0])
    finally:
        multinomial._draws_alike.cache_clear()


SETTINGS = {
    "plain": {"top_k": 0},
    "warped": {"top_k": 20, "top_p": 0.8, "temperature": 1.3},
    "rows": {"num_return_sequences": 3},
}


@pytest.mark.parametrize("prompts", [1, 3])
@pytest.mark.parametrize("name", SETTINGS)
def test_generate_draws_what_native_draws_and_leaves_the_seed_where_native_does(name: str, prompts: int) -> None:
    native = make_model()
    wrapped = orca_hf.wrap(make_model())
    ids = torch.tensor([PROMPTS[0]] * prompts)
    call = {"do_sample": True, "max_new_tokens": 12, "eos_token_id": [3, 4], "pad_token_id": 0, **SETTINGS[name]}
    results = []
    for model in (native, wrapped):
        torch.manual_seed(11)
        results.append((model.generate(ids, **call), torch.get_rng_state()))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
