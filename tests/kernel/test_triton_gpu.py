"""The Triton kernels on a GPU: no more than twice the error of torch in the same dtype."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_cases import (
    BOUNDED_CASES,
    LARGE_CASES,
    NAN,
    SMALL_CASES,
    SPLIT_CASES,
    STORE_CASES,
    Case,
    bounded,
    case_id,
    error_and_bound,
    make,
)

from orca_kernels import RaggedBatch, selective_attention, store_kv
from orca_kernels.ragged import upload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
WIDE_CASES = [replace(case, name=f"{case.name}_{d}", head_dim=d) for case in LARGE_CASES[:3] for d in (128, 256)]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", SMALL_CASES + LARGE_CASES + WIDE_CASES, ids=case_id)
def test_native_kernel_errs_no_more_than_torch(case: Case, dtype: torch.dtype) -> None:
    inputs = make(case, dtype, "cuda")
    out = selective_attention(*inputs.args, **inputs.options)
    assert out.dtype == dtype
    error, bound = error_and_bound(inputs, out)
    assert error <= bound


@pytest.mark.parametrize("num_splits", [2, 16])
@pytest.mark.parametrize("case", SPLIT_CASES + LARGE_CASES[:3], ids=case_id)
def test_split_kernel_errs_no_more_than_torch(case: Case, num_splits: int) -> None:
    from orca_kernels import triton_attention

    inputs = make(case, torch.bfloat16, "cuda")
    out = triton_attention.selective_attention(*inputs.args, **inputs.options, num_splits=num_splits)
    error, bound = error_and_bound(inputs, out)
    assert error <= bound


@pytest.mark.parametrize("case", STORE_CASES, ids=case_id)
def test_store_writes_the_new_tokens_and_nothing_else(case: Case) -> None:
    inputs = make(case, torch.bfloat16, "cuda")
    batch = inputs.batch
    key_cache, value_cache = torch.full_like(inputs.key_cache, NAN), torch.full_like(inputs.value_cache, NAN)
    key, value = (torch.randn_like(cache[: batch.total_q]).nan_to_num() for cache in (key_cache, value_cache))
    expected_key, expected_value = key_cache.clone(), value_cache.clone()
    expected_key[batch.slot_mapping], expected_value[batch.slot_mapping] = key, value
    store_kv(key, value, key_cache, value_cache, batch)
    torch.testing.assert_close(key_cache, expected_key, equal_nan=True, rtol=0, atol=0)
    torch.testing.assert_close(value_cache, expected_value, equal_nan=True, rtol=0, atol=0)


def test_launch_does_not_wait_for_the_device() -> None:
    inputs = make(LARGE_CASES[0], torch.float16, "cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        selective_attention(*inputs.args, **inputs.options)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("num_splits", [None, 2, 16])
@pytest.mark.parametrize("case", BOUNDED_CASES, ids=case_id)
def test_decodes_of_unknown_lengths_err_no_more_than_torch(case: Case, num_splits: int | None) -> None:
    from orca_kernels import triton_attention

    inputs = make(case, torch.bfloat16, "cuda")
    args = bounded(inputs).args
    out = triton_attention.selective_attention(*args, **inputs.options, num_splits=num_splits)
    error, bound = error_and_bound(inputs, out)
    assert error <= bound


def test_a_batch_goes_up_without_waiting_and_arrives() -> None:
    lens = {"query_lens": [1, 3], "kv_lens": [6, 3], "blocks": [[4, 5, 6], [2]], "block_size": 4}
    here = RaggedBatch.build(**lens, device="cpu")
    torch.cuda.set_sync_debug_mode("error")
    try:
        there, (other,) = here.to_with(torch.device("cuda"), [torch.arange(5)])
        table = there.block_table
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(other.cpu(), torch.arange(5))
    for name in ("cu_seqlens_q", "kv_lens", "slot_mapping", "first_blocks"):
        assert torch.equal(getattr(there, name).cpu(), getattr(here, name))
    assert torch.equal(table.cpu(), here.block_table)
    assert all(tensor.data_ptr() % 16 == 0 for tensor in upload([torch.arange(3), torch.arange(5)], other.device))
