"""What the library makes has the dtype and the device that it says, whatever the user's defaults are."""

import ast
from pathlib import Path

import pytest
import torch
from oracle import assert_same_outcome, num_iterations
from tiny import PROMPTS, make_model, pad_left
from torch.utils._device import _device_constructors

import orca_hf
from orca_hf import OrcaConfig

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "orca_hf").rglob("*.py")) + sorted((ROOT / "kernels" / "orca_kernels").rglob("*.py"))
# Every function of torch that makes a tensor on the default device; the classes take the default dtype besides.
FACTORIES = {factory.__name__ for factory in _device_constructors()} | {"normal"}
CLASSES = {name for name in vars(torch) if name.endswith("Tensor")}


def faults(source: str) -> list[str]:
    """The calls in a source whose result's dtype or device is the user's default."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not ast.unparse(node.func).startswith("torch."):
            continue
        name = ast.unparse(node.func).removeprefix("torch.")
        missing = {"dtype", "device"} - {keyword.arg for keyword in node.keywords}
        if (name in FACTORIES and missing) or name in CLASSES:
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


@pytest.mark.parametrize("path", [path for path in SOURCES if "bench" not in path.parts], ids=lambda path: path.name)
def test_every_tensor_is_made_with_its_dtype_and_its_device(path):
    assert faults(path.read_text()) == []


@pytest.mark.parametrize(
    ("source", "is_fault"),
    [
        ("torch.empty(3)", True),
        ("torch.tensor([1], dtype=torch.long)", True),
        ("x = f(torch.full((2,), 0, device=d))", True),
        ("torch.FloatTensor([1.0])", True),
        ("torch.arange(3, dtype=torch.long, device=d)", False),
        ("x.new_zeros(3)", False),
        ("torch.empty_like(x)", False),
    ],
)
def test_the_reader_tells_them_apart(source, is_fault):
    assert bool(faults(source)) is is_fault


CALLS = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "top_k": 0},
    "top-p": {"do_sample": True, "top_k": 0, "top_p": 0.8, "temperature": 0.7},
    "scores": {"do_sample": False, "output_scores": True, "return_dict_in_generate": True},
}
LENGTH = 24  # of answers long enough that packing pays


@pytest.fixture(params=["compiled", "plain"])
def _kernels(request, monkeypatch):
    """Everything holds with and without a compiler."""
    if request.param == "plain":
        for place in ("orca_kernels.compiled", "orca_kernels.cpu"):
            monkeypatch.setattr(f"{place}.library", lambda: None)
            monkeypatch.setattr(f"{place}.loaded", lambda: None)


@pytest.fixture(name="set_default")
def _set_default():
    """Sets a default dtype or device until the test ends."""

    def set_default(default):
        if isinstance(default, torch.dtype):
            torch.set_default_dtype(default)
        else:
            torch.set_default_device(default)

    yield set_default
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("default", [torch.bfloat16, torch.float16, torch.float64, "meta"], ids=str)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("model_type", ["llama", "gpt2", "bloom"])
def test_the_default_dtype_and_device_change_nothing(set_default, default, call, model_type):
    batch = pad_left(PROMPTS)
    twins = make_model(model_type), orca_hf.wrap(make_model(model_type), OrcaConfig(max_slots=512))
    set_default(default)
    assert_same_outcome(twins, lambda model: model.generate(**batch, max_new_tokens=LENGTH, **CALLS[call]))
    assert num_iterations(twins[1])


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("default", [torch.bfloat16, torch.float16, torch.float64, "meta"], ids=str)
def test_a_bfloat16_model_rounds_as_it_does_without(set_default, default):
    """Natively its sums are rounded in another order; so it is compared with itself."""
    batch, options = pad_left(PROMPTS), {"max_new_tokens": LENGTH, "do_sample": False}
    model = orca_hf.wrap(make_model().bfloat16(), OrcaConfig(max_slots=512))
    expected = model.generate(**batch, **options)
    again = orca_hf.wrap(make_model().bfloat16(), OrcaConfig(max_slots=512))
    set_default(default)
    assert torch.equal(model.generate(**batch, **options), expected)
    assert torch.equal(again.generate(**batch, **options), expected)
