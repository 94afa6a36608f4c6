"""The CPU backend equals the reference, reads nothing that is not a request's own, and copies no K/V."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import LARGE_CASES, NAN, SMALL_CASES, Case, case_id, error_and_bound, make
from torch.utils._python_dispatch import TorchDispatchMode

from orca_kernels import RaggedBatch, compiled, selective_attention, store_kv


@pytest.fixture(autouse=True, params=["torch", "compiled"])
def _kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything holds with PyTorch's operations alone, and with the compiled kernels."""
    library = compiled.library() if request.param == "compiled" else None
    if request.param == "compiled" and library is None:
        pytest.skip("the kernels cannot be compiled on this machine")
    monkeypatch.setattr("orca_kernels.cpu.loaded", lambda: library)


@pytest.mark.parametrize("case", SMALL_CASES + LARGE_CASES, ids=case_id)
def test_float32_equals_reference(case: Case) -> None:
    inputs = make(case, torch.float32)
    out = selective_attention(*inputs.args, **inputs.options, backend="cpu")
    reference = selective_attention(*inputs.args, **inputs.options, backend="reference")
    torch.testing.assert_close(out, reference, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", SMALL_CASES + LARGE_CASES[:3], ids=case_id)
def test_low_precision_errs_no_more_than_torch(case: Case, dtype: torch.dtype) -> None:
    inputs = make(case, dtype)
    with torch.no_grad():
        out = selective_attention(*inputs.args, **inputs.options)
    assert out.dtype == dtype
    error, bound = error_and_bound(inputs, out)
    assert error <= bound


@given(
    lens=st.lists(
        st.integers(1, 40).flatmap(lambda kv_len: st.tuples(st.integers(1, kv_len), st.just(kv_len))),
        min_size=1,
        max_size=6,
    ),
    heads=st.sampled_from([(4, 4), (6, 2), (3, 1)]),
    block_size=st.sampled_from([1, 3, 16]),
    consecutive=st.booleans(),
    window=st.none() | st.integers(1, 50),
    flags=st.fixed_dictionaries(
        {"softcap": st.sampled_from([None, 5.0]), "sinks": st.booleans(), "alibi": st.booleans()}
    ),
)
@settings(max_examples=40, deadline=None)
def test_any_ragged_batch_equals_reference(
    lens: list[tuple[int, int]],
    heads: tuple[int, int],
    block_size: int,
    consecutive: bool,
    window: int | None,
    flags: dict[str, Any],
) -> None:
    case = Case("any", lens, heads, head_dim=16, block_size=block_size, consecutive=consecutive, window=window, **flags)
    inputs = make(case, torch.float32)
    out = selective_attention(*inputs.args, **inputs.options)
    reference = selective_attention(*inputs.args, **inputs.options, backend="reference")
    torch.testing.assert_close(out, reference, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "case",
    [
        Case("decodes", [(1, 512), (1, 700)], heads=(9, 3), consecutive=True),
        Case("decodes_window", [(1, 512), (1, 700)], heads=(9, 3), consecutive=True, window=500),
        Case("decodes_alibi", [(1, 512), (1, 700)], heads=(9, 3), consecutive=True, alibi=True),
        Case("decodes_softcap", [(1, 512), (1, 700)], heads=(9, 3), consecutive=True, softcap=30.0),
        Case("decodes_sinks", [(1, 512), (1, 700)], heads=(9, 3), consecutive=True, sinks=True),
        Case("chunk_and_decode", [(4, 512), (1, 700)], heads=(9, 3), consecutive=True),
        Case("chunk_narrow_values", [(4, 512)], heads=(4, 4), v_head_dim=32, consecutive=True),
    ],
    ids=case_id,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_consecutive_kv_is_not_copied(case: Case, dtype: torch.dtype) -> None:
    inputs = make(case, dtype)
    _, key_cache, value_cache, batch = inputs.args
    assert None not in batch.first_slots
    caches = {cache.untyped_storage().data_ptr() for cache in (key_cache, value_cache)}
    smallest = 500 * min(key_cache[0].numel(), value_cache[0].numel())

    class NoCopies(TorchDispatchMode):
        def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, (tuple, list)) else [result]:
                if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in caches:
                    assert tensor.numel() < smallest, f"{func} made a tensor of {tuple(tensor.shape)}"
            return result

    with NoCopies(), torch.no_grad():
        selective_attention(*inputs.args, **inputs.options)


def test_layers_share_masks_but_not_results() -> None:
    inputs = make(Case("layers", [(5, 30), (1, 40)], alibi=True, consecutive=True), torch.float32)
    query, key_cache, value_cache, batch = inputs.args
    for layer in range(3):
        layer_values = value_cache * (layer + 1)
        out = selective_attention(query, key_cache, layer_values, batch, **inputs.options)
        reference = selective_attention(query, key_cache, layer_values, batch, **inputs.options, backend="reference")
        torch.testing.assert_close(out, reference, rtol=1e-5, atol=1e-5)
    other = inputs.options | {"alibi_slopes": inputs.options["alibi_slopes"] * 2}
    out = selective_attention(query, key_cache, value_cache, batch, **other)
    reference = selective_attention(query, key_cache, value_cache, batch, **other, backend="reference")
    torch.testing.assert_close(out, reference, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}, {"window": 9}], ids=str)
def test_neighbours_do_not_change_a_single_bit(options: dict[str, Any]) -> None:
    inputs = make(Case("neighbours", [(1, 300), (7, 30), (1, 20)], consecutive=True, **options), torch.float32)
    query, key_cache, value_cache, batch = inputs.args
    together = selective_attention(*inputs.args, **inputs.options)
    offset = 0
    for query_len, kv_len, owned in zip(batch.query_lens_host, batch.kv_lens_host, inputs.blocks, strict=True):
        alone = RaggedBatch.build(
            query_lens=[query_len], kv_lens=[kv_len], blocks=[owned], block_size=batch.block_size, device="cpu"
        )
        rows = slice(offset, offset + query_len)
        out = selective_attention(query[rows], key_cache, value_cache, alone, **inputs.options)
        assert torch.equal(out, together[rows])
        offset += query_len


def test_requests_may_share_slots() -> None:
    batch = RaggedBatch.build(query_lens=[1, 1], kv_lens=[7, 9], blocks=[[1, 2], [1, 2, 3]], block_size=4, device="cpu")
    cache = torch.randn(20, 2, 8)
    query = torch.randn(2, 4, 8)
    out = selective_attention(query, cache, cache, batch, scaling=0.3)
    reference = selective_attention(query, cache, cache, batch, scaling=0.3, backend="reference")
    torch.testing.assert_close(out, reference, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lens", [[(4, 9)], [(4, 9), (1, 3), (2, 2)]], ids=["one_request", "several"])
@pytest.mark.parametrize("consecutive", [True, False])
def test_store_writes_the_new_tokens_and_nothing_else(lens: list[tuple[int, int]], consecutive: bool) -> None:
    inputs = make(Case("store", lens, block_size=4, head_dim=8, v_head_dim=6, consecutive=consecutive), torch.float32)
    batch = inputs.batch
    key_cache, value_cache = torch.full_like(inputs.key_cache, NAN), torch.full_like(inputs.value_cache, NAN)
    key = torch.randn(2, batch.total_q, 8).transpose(0, 1)
    value = torch.randn(2, batch.total_q, 6).transpose(0, 1)
    store_kv(key, value, key_cache, value_cache, batch)
    row = 0
    expected_key, expected_value = torch.full_like(key_cache, NAN), torch.full_like(value_cache, NAN)
    for (query_len, kv_len), owned in zip(lens, inputs.blocks, strict=True):
        for position in range(kv_len - query_len, kv_len):
            slot = owned[position // 4] * 4 + position % 4
            expected_key[slot], expected_value[slot] = key[row], value[row]
            row += 1
    torch.testing.assert_close(key_cache, expected_key, equal_nan=True, rtol=0, atol=0)
    torch.testing.assert_close(value_cache, expected_value, equal_nan=True, rtol=0, atol=0)
