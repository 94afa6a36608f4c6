"""Makes this folder's helper modules importable (the suite's import mode leaves sys.path alone), and keeps it quick."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """The cases are tiny: where the cores are busy, threads that wait for each other take most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
