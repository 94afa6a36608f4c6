"""The Triton kernels compute the right numbers, on the CPU.

Triton decides at import whether it interprets, and another test of this process may have imported it already. So one
child process runs all the cases, and each test below reads its own case's outcome.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from kernel_cases import INTERPRETED

pytest.importorskip("triton")
HERE = Path(__file__).parent
KERNELS = HERE.parents[1] / "kernels"


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    path = os.pathsep.join([str(KERNELS), str(HERE), os.environ.get("PYTHONPATH", "")])
    child = subprocess.run(
        [sys.executable, str(HERE / "interpret_cases.py")],
        env=os.environ | {"PYTHONPATH": path, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    if child.returncode:
        pytest.fail(f"interpret_cases.py ended with {child.returncode}:\n{child.stderr}")
    result: dict[str, str] = json.loads(child.stdout)
    return result


@pytest.mark.parametrize("name", INTERPRETED)
def test_interpreted_kernel_is_right(outcomes: dict[str, str], name: str) -> None:
    if outcomes[name]:
        pytest.fail(outcomes[name])
