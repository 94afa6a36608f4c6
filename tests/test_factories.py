"""What the library makes has the dtype and the device that it says, whatever the user's defaults are."""

import ast
from pathlib import Path

import pytest
import torch
from torch.utils._device import _device_constructors

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
