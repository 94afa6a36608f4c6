"""Runs the Triton kernels on the CPU in Triton's interpreter; a program of its own, see `test_triton_interpreter`.

Prints one JSON object: for each case, what went wrong (a traceback), or "" when nothing did.
"""

from __future__ import annotations

import os

# Read by `triton.jit` when a kernel is defined, so this process must have it before the first import of triton.
os.environ["TRITON_INTERPRET"] = "1"

import json
import sys
import traceback

import torch
from kernel_cases import INTERPRETED, NAN, Case, bounded, error_and_bound, make

from orca_kernels import triton_attention, triton_store


def attend(case: Case, dtype: torch.dtype, num_splits: int | None, *, is_bounded: bool) -> None:
    inputs = make(case, dtype)
    args = bounded(inputs).args if is_bounded else inputs.args
    out = triton_attention.selective_attention(*args, **inputs.options, num_splits=num_splits)
    assert out.dtype == dtype, out.dtype
    error, bound = error_and_bound(inputs, out)
    assert error <= bound, f"error {error:.3g} > {bound:.3g}"


def store(case: Case) -> None:
    inputs = make(case, torch.float32)
    batch = inputs.batch
    key_cache, value_cache = torch.full_like(inputs.key_cache, NAN), torch.full_like(inputs.value_cache, NAN)
    key = torch.randn(case.heads[1], batch.total_q, key_cache.shape[2]).transpose(0, 1)
    value = torch.randn(case.heads[1], batch.total_q, value_cache.shape[2]).transpose(0, 1)
    expected_key, expected_value = key_cache.clone(), value_cache.clone()
    expected_key[batch.slot_mapping], expected_value[batch.slot_mapping] = key, value
    triton_store.store_kv(key, value, key_cache, value_cache, batch)
    torch.testing.assert_close(key_cache, expected_key, equal_nan=True, rtol=0, atol=0)
    torch.testing.assert_close(value_cache, expected_value, equal_nan=True, rtol=0, atol=0)


def main() -> None:
    torch.set_num_threads(1)
    outcomes = {}
    for name, (what, case, dtype, num_splits) in INTERPRETED.items():
        try:
            if what == "store":
                store(case)
            else:
                attend(case, dtype, num_splits, is_bounded=what == "bounded")
            outcomes[name] = ""
        except Exception:  # whatever it is, it is this case's outcome
            outcomes[name] = traceback.format_exc()
    json.dump(outcomes, sys.stdout)


if __name__ == "__main__":
    main()
