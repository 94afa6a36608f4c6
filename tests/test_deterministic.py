"""Promise: with `deterministic=True` a request's logits are the same to the last bit, whoever shares its iterations."""

import random

import pytest
import torch
from tiny import make_model, pad_left

import orca_hf
from orca_hf import OrcaConfig
from orca_hf.batch_invariance import ROWS, BatchInvariantProducts
from orca_kernels import compiled

# From one token to several pieces of rows.
LENGTHS = (1, 3, 7, ROWS, ROWS + 1, 2 * ROWS + 1, 50, 2)
CONFIGS = [
    {"max_batch_size": 1, "max_batch_tokens": None},
    {"max_batch_size": 3, "max_batch_tokens": 9, "block_size": 4},
    {"max_batch_size": 8, "max_batch_tokens": 64},
    {"max_batch_size": 8, "max_batch_tokens": None, "block_size": 32},
]


def make_prompts(seed):
    numbers = random.Random(seed)
    return [[numbers.randrange(3, 97) for _ in range(length)] for length in LENGTHS]


def run(model, prompts, **options):
    made = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    result = model.generate(**pad_left(prompts), **{**made, **options})
    return result.sequences[:, -6:], torch.stack(result.logits, dim=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("pack_weights", [True, False], ids=["packed", "plain"])
@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gemma2", "qwen3_moe", "mistral"])
def test_logits_do_not_depend_on_neighbours_or_settings(model_type, pack_weights, dtype):
    model = make_model(model_type).to(dtype)
    prompts = make_prompts(0)
    expected = None
    for config in CONFIGS:
        orca_hf.wrap(model, OrcaConfig(deterministic=True, pack_weights=pack_weights, max_slots=1024, **config))
        assert orca_hf.explain(model).runs_by == "orca"
        found = run(model, prompts)[1]
        expected = found if expected is None else expected
        assert torch.equal(found, expected), config
    for row, prompt in enumerate(prompts):
        assert torch.equal(run(model, [prompt])[1][0], expected[row]), "alone"
    others = make_prompts(1)
    assert torch.equal(run(model, [*others[:4], prompts[2], *others[4:]])[1][4], expected[2]), "among others"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_weights_are_packed_from_the_first_iteration_or_never(dtype):
    """A packed product adds in another order, so whether one is used must not depend on how much work there is."""
    model = orca_hf.wrap(make_model().to(dtype), OrcaConfig(deterministic=True))
    run(model, [[5]], max_new_tokens=1)
    (engine,) = model.generate.engines
    can_pack = dtype is not torch.float16 and compiled.library() is not None
    assert (engine.stats.packed_bytes > 0) == can_pack
    packed = engine.stats.packed_bytes
    first = run(model, make_prompts(0))[1]
    assert engine.stats.packed_bytes == packed
    orca_hf.release(model)
    assert torch.equal(run(model, make_prompts(0))[1], first)


def test_weights_that_change_are_packed_anew():
    model = orca_hf.wrap(make_model(), OrcaConfig(deterministic=True))
    prompts = make_prompts(0)
    before = run(model, prompts)[1]
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.data.mul_(2)
    changed = run(model, prompts)[1]
    assert not torch.equal(changed, before)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.data.div_(2)
    assert torch.equal(run(model, prompts)[1], before)


def test_sampled_tokens_do_not_depend_on_settings():
    model = make_model().to(torch.bfloat16)
    tokens = []
    for config in CONFIGS:
        orca_hf.wrap(model, OrcaConfig(deterministic=True, max_slots=1024, **config))
        torch.manual_seed(5)
        tokens.append(run(model, make_prompts(2), do_sample=True)[0].tolist())
    assert all(each == tokens[0] for each in tokens)


def test_greedy_tokens_equal_native_in_fp32():
    model = make_model()
    prompts = make_prompts(3)
    native = run(model, prompts)[0]
    orca_hf.wrap(model, OrcaConfig(deterministic=True, max_batch_size=3, max_batch_tokens=20))
    assert torch.equal(run(model, prompts)[0], native)


@pytest.mark.parametrize("rows", [1, ROWS - 1, ROWS, ROWS + 1, 5 * ROWS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_in_pieces_are_products(rows, dtype):
    torch.manual_seed(rows)
    left, right, bias = (torch.randn(*shape).to(dtype) for shape in ((rows, 24), (24, 40), (40,)))
    ends = torch.tensor([0, rows // 2, rows // 2 + 1], dtype=torch.int32)
    weights = torch.randn(3, 24, 40).to(dtype)
    products = {
        "mm": lambda: left @ right,
        "linear": lambda: torch.nn.functional.linear(left[None], right.t(), bias),
        "addmm": lambda: torch.addmm(left @ right, left, right, beta=0.5, alpha=2.0),
        "bmm": lambda: torch.bmm(left.expand(3, -1, -1), weights),
        "grouped": lambda: torch._grouped_mm(left, weights, offs=ends)[: rows // 2 + 1],
    }
    for name, product in products.items():
        with BatchInvariantProducts():
            ours = product()
        torch.testing.assert_close(ours, product(), msg=lambda text, name=name: f"{name}: {text}")


ODD = {
    "depends on the number of rows by less than rounding": (
        lambda output: output * (1 + 1e-6 * output.shape[1]),
        "depend on who shares an iteration",
    ),
    "uses a product of another kind": (
        lambda output: torch.baddbmm(output, output, torch.zeros(1, output.shape[2], output.shape[2])),
        "does not know how to run aten.baddbmm",
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_a_model_that_cannot_be_made_deterministic_goes_native(name, monkeypatch):
    change, reason = ODD[name]
    model = make_model()
    mlp = type(model.model.layers[0].mlp)
    plain = mlp.forward
    monkeypatch.setattr(mlp, "forward", lambda self, hidden: change(plain(self, hidden)))
    orca_hf.wrap(model, OrcaConfig(deterministic=True, trust_modules=(__name__,)))
    assert reason in str(orca_hf.explain(model))
    orca_hf.wrap(model, OrcaConfig(trust_modules=(__name__,)))
    assert orca_hf.explain(model).runs_by == "orca", "without the setting nobody minds"
