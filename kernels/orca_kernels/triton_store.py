"""`store_kv` in Triton: one launch writes K and V of every request's new tokens."""

# Triton's own parameters are typed by Triton, and its constants are written in capitals.
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: N803

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .ragged import RaggedBatch
from .tiles import next_power_of_two

_MAX_ELEMENTS = 4096


@triton.jit
def store_kernel(
    key_ptr,  # (total_q, num_kv_heads, HEAD_DIM)
    value_ptr,  # (total_q, num_kv_heads, V_HEAD_DIM)
    key_cache_ptr,  # (num_slots, num_kv_heads, HEAD_DIM)
    value_cache_ptr,  # (num_slots, num_kv_heads, V_HEAD_DIM)
    slot_mapping_ptr,  # (total_q,) int64
    num_kv_heads,
    stride_key_token,
    stride_key_head,
    stride_key_dim,
    stride_value_token,
    stride_value_head,
    stride_value_dim,
    stride_key_cache_slot,
    stride_key_cache_head,
    stride_value_cache_slot,
    stride_value_cache_head,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """K and V of one new token (axis 0), for some of the heads (axis 1)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    dims = tl.arange(0, BLOCK_D)[None, :]

    key_mask = (heads < num_kv_heads) & (dims < HEAD_DIM)
    key_offsets = token * stride_key_token + heads * stride_key_head + dims * stride_key_dim
    key = tl.load(key_ptr + key_offsets, mask=key_mask)
    tl.store(
        key_cache_ptr + slot * stride_key_cache_slot + heads * stride_key_cache_head + dims,
        key,
        mask=key_mask,
    )

    value_mask = (heads < num_kv_heads) & (dims < V_HEAD_DIM)
    value_offsets = token * stride_value_token + heads * stride_value_head + dims * stride_value_dim
    value = tl.load(value_ptr + value_offsets, mask=value_mask)
    tl.store(
        value_cache_ptr + slot * stride_value_cache_slot + heads * stride_value_cache_head + dims,
        value,
        mask=value_mask,
    )


def store_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, batch: RaggedBatch) -> None:
    """Writes the new tokens' K and V to their slots; shapes and errors as in `orca_kernels.store_kv`."""
    if key_cache.stride(2) != 1 or value_cache.stride(2) != 1:
        raise ValueError(
            "The caches' last dimension must have stride 1, got "
            f"{key_cache.stride(2)} for key_cache and {value_cache.stride(2)} for value_cache."
        )
    num_kv_heads, head_dim = key.shape[1:]
    v_head_dim = value.shape[2]
    block_d = next_power_of_two(max(head_dim, v_head_dim))
    block_h = min(next_power_of_two(num_kv_heads), max(1, _MAX_ELEMENTS // block_d))
    grid = (batch.total_q, triton.cdiv(num_kv_heads, block_h))
    with torch.cuda.device_of(key):
        store_kernel[grid](
            key,
            value,
            key_cache,
            value_cache,
            batch.slot_mapping,
            num_kv_heads,
            *key.stride(),
            *value.stride(),
            *key_cache.stride()[:2],
            *value_cache.stride()[:2],
            HEAD_DIM=head_dim,
            V_HEAD_DIM=v_head_dim,
            BLOCK_H=block_h,
            BLOCK_D=block_d,
        )
