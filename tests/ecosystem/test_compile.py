"""Promise: what its owner compiled runs compiled, natively, and says so; the heart of torch.compile(model) by Orca."""

import pytest
import torch
from tiny import PROMPTS, make_model, pad_left

import orca_hf
from orca_hf import OrcaConfig

BATCH = {**pad_left(PROMPTS[1:3]), "max_new_tokens": 2, "do_sample": False}
CONFIG = OrcaConfig(max_slots=512)


@pytest.fixture(autouse=True)
def _fresh_compiler():
    yield
    torch._dynamo.reset()


def test_the_model_inside_a_compiled_one_runs_by_orca():
    """Natively generate() of a compiled model runs the model inside, uncompiled."""
    compiled = orca_hf.wrap(torch.compile(make_model(), backend="aot_eager"), CONFIG)
    torch._dynamo.utils.counters.clear()
    assert torch.equal(compiled.generate(**BATCH), make_model().generate(**BATCH))
    assert orca_hf.explain(compiled).runs_by == "orca"
    assert not torch._dynamo.utils.counters["stats"], "nothing of Orca's has been compiled"


def method_of_a_part(model):
    model.model.layers[0].mlp.compile(backend="eager")


def part(model):
    model.model.layers[0].mlp = torch.compile(model.model.layers[0].mlp, backend="aot_eager")


def forward_of_a_part(model):
    mlp = model.model.layers[0].mlp
    mlp.forward = torch.compile(mlp.forward, backend="eager")


COMPILED = {
    "model.compile()": (lambda model: model.compile(backend="eager"), "is compiled"),
    "compile() of a part": (method_of_a_part, "LlamaMLP is compiled"),
    "a compiled part": (part, "OptimizedModule has a forward of its own"),
    "a compiled forward": (forward_of_a_part, "LlamaMLP has a forward of its own"),
}


@pytest.mark.parametrize("name", COMPILED)
def test_what_is_compiled_runs_natively(name):
    compile_it, reason = COMPILED[name]
    expected = make_model().generate(**BATCH)
    model = orca_hf.wrap(make_model(), CONFIG)
    assert torch.equal(model.generate(**BATCH), expected)
    iterations = model.generate.engines[0].stats.num_iterations
    compile_it(model)
    assert torch.equal(model.generate(**BATCH), expected)
    assert reason in str(orca_hf.explain(model))
    assert model.generate.engines[0].stats.num_iterations == iterations
