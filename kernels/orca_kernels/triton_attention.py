"""Selective attention in Triton: prefills, decodes and mixtures of them in one launch.

A program owns one query block of one request (some tokens x the heads that share a K/V head) and walks the K/V that
the block sees, so that a K/V tile is loaded once for all of its heads. The thread blocks of all requests are
concatenated into one grid, as the paper does for its split attention (section 3.2). When few programs are long, the
K/V is cut over the grid's third axis (Flash-Decoding), and a second kernel merges the parts by their log-sum-exp.

The softmax runs in base 2: scores are scaled by log2(e) once, and exp2 is what the hardware has.
"""

# Triton's own parameters are typed by Triton, and its constants are written in capitals.
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: N803, N806

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from .ragged import RaggedBatch
from .tiles import DECODE_ROWS, BlockShape, Tile, block_shape, choose_tile, next_power_of_two, num_kv_splits

LOG2E = tl.constexpr(1.4426950408889634)
# Bytes of partial results that a launch may ask for.
_MAX_PARTIAL_BYTES = 1 << 27


@triton.jit
def _find_request(cu_seqlens_q_ptr, block, num_requests, BLOCK_TOKENS: tl.constexpr):
    # Request i owns the query blocks from cu_seqlens_q[i] // BLOCK_TOKENS + i on. That is never fewer than it needs,
    # and is known without a prefix sum over block counts. Returns the last request that starts at or before `block`.
    low = 0
    high = num_requests
    while low < high:
        middle = (low + high) // 2
        if tl.load(cu_seqlens_q_ptr + middle) // BLOCK_TOKENS + middle <= block:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def _attend_tiles(
    acc,  # (BLOCK_M, BLOCK_DV) float32
    row_max,  # (BLOCK_M,) float32, base 2
    row_sum,  # (BLOCK_M,) float32
    q,  # (BLOCK_M, BLOCK_D)
    positions,  # (BLOCK_M,) of the queries
    slopes,  # (BLOCK_M,) float32
    key_ptr,  # (num_slots, HEAD_DIM): the cache at this program's K/V head
    value_ptr,  # (num_slots, V_HEAD_DIM)
    table_ptr,  # (max_num_blocks,): the row of this request
    begin,
    end,
    num_keys,
    scaling,
    softcap,
    sliding_window,
    stride_key_slot,
    stride_value_slot,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Folds the keys begin .. end - 1, in tiles of BLOCK_N, into the running softmax; MASKED if a row misses some."""
    dims = tl.arange(0, BLOCK_D)
    v_dims = tl.arange(0, BLOCK_DV)
    for start in range(begin, end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        # Slots past the block's last key may hold NaN: they are never loaded, since 0 x NaN is NaN.
        if MASKED:
            exists = keys < num_keys
            blocks = tl.load(table_ptr + keys // BLOCK_SIZE, mask=exists, other=0)
        else:
            exists = keys >= 0
            blocks = tl.load(table_ptr + keys // BLOCK_SIZE)
        slots = blocks.to(tl.int64) * BLOCK_SIZE + keys % BLOCK_SIZE

        key_offsets = slots[None, :] * stride_key_slot + dims[:, None]
        if MASKED or HEAD_DIM != BLOCK_D:
            k = tl.load(key_ptr + key_offsets, mask=exists[None, :] & (dims[:, None] < HEAD_DIM), other=0.0)
        else:
            k = tl.load(key_ptr + key_offsets)
        scores = tl.dot(q, k, input_precision=PRECISION) * scaling
        if HAS_SOFTCAP:
            scores = scores / softcap
            scores = softcap * (1.0 - 2.0 / (1.0 + tl.exp2(scores * (2.0 * LOG2E))))
        if HAS_ALIBI:
            scores += slopes[:, None] * (keys[None, :] - positions[:, None]).to(tl.float32)
        scores *= LOG2E
        if MASKED:
            visible = keys[None, :] <= positions[:, None]
            if HAS_WINDOW:
                visible = visible & (keys[None, :] > positions[:, None] - sliding_window)
            scores = tl.where(visible, scores, float("-inf"))

        new_max = tl.maximum(row_max, tl.max(scores, axis=1))
        # A row that has seen no key yet: -inf - (-inf) is NaN, -inf - 0 is what is meant.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max) if MASKED else new_max
        weights = tl.exp2(scores - shift[:, None])
        rescale = tl.exp2(row_max - shift)
        row_sum = row_sum * rescale + tl.sum(weights, axis=1)
        row_max = new_max

        value_offsets = slots[:, None] * stride_value_slot + v_dims[None, :]
        if MASKED or V_HEAD_DIM != BLOCK_DV:
            v = tl.load(value_ptr + value_offsets, mask=exists[:, None] & (v_dims[None, :] < V_HEAD_DIM), other=0.0)
        else:
            v = tl.load(value_ptr + value_offsets)
        acc = acc * rescale[:, None]
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, row_max, row_sum


@triton.jit(do_not_specialize=["num_requests", "sliding_window", "stride_table"])
def attention_kernel(
    query_ptr,  # (total_q, num_heads, HEAD_DIM)
    key_cache_ptr,  # (num_slots, num_kv_heads, HEAD_DIM)
    value_cache_ptr,  # (num_slots, num_kv_heads, V_HEAD_DIM)
    out_ptr,  # (total_q, num_heads, V_HEAD_DIM); SPLIT: (total_q, num_heads, num_splits, V_HEAD_DIM) float32
    lse_ptr,  # SPLIT: (total_q, num_heads, num_splits) float32, base 2; else None
    cu_seqlens_q_ptr,  # (num_requests + 1,) int32
    kv_lens_ptr,  # (num_requests,) int32
    block_table_ptr,  # (num_requests, max_num_blocks) int32
    sinks_ptr,  # HAS_SINKS: (num_heads,); else None
    slopes_ptr,  # HAS_ALIBI: (num_heads,); else None
    scaling,
    softcap,
    sliding_window,
    num_requests,
    stride_query_token,
    stride_query_head,
    stride_key_slot,
    stride_key_head,
    stride_value_slot,
    stride_value_head,
    stride_table,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS_PER_BLOCK: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SINGLE_BLOCK: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One query block (axis 0) of one request, one K/V head or part of its group (axis 1), one K/V split (axis 2)."""
    # In a long prompt the last query blocks have the most keys; they start first, so that none runs on alone.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    if SINGLE_BLOCK:
        request = block
        first_row = tl.load(cu_seqlens_q_ptr + request)
        first_token = 0
    else:
        request = _find_request(cu_seqlens_q_ptr, block, num_requests, BLOCK_TOKENS)
        first_row = tl.load(cu_seqlens_q_ptr + request)
        first_token = (block - first_row // BLOCK_TOKENS - request) * BLOCK_TOKENS
    query_len = tl.load(cu_seqlens_q_ptr + request + 1) - first_row
    if first_token >= query_len:
        return
    kv_len = tl.load(kv_lens_ptr + request)

    # Rows of the block: HEADS_PER_BLOCK heads of token 0, then of token 1, ...
    HEAD_BLOCKS: tl.constexpr = (GROUP + HEADS_PER_BLOCK - 1) // HEADS_PER_BLOCK
    kv_head = tl.program_id(1) // HEAD_BLOCKS
    rows = tl.arange(0, BLOCK_M)
    tokens = first_token + rows // HEADS_PER_BLOCK
    group_heads = (tl.program_id(1) % HEAD_BLOCKS) * HEADS_PER_BLOCK + rows % HEADS_PER_BLOCK
    heads = kv_head * GROUP + group_heads
    owned = (rows < BLOCK_TOKENS * HEADS_PER_BLOCK) & (tokens < query_len) & (group_heads < GROUP)
    flat_tokens = (first_row + tokens).to(tl.int64)

    dims = tl.arange(0, BLOCK_D)
    query_offsets = flat_tokens[:, None] * stride_query_token + heads[:, None] * stride_query_head + dims[None, :]
    q = tl.load(query_ptr + query_offsets, mask=owned[:, None] & (dims[None, :] < HEAD_DIM), other=0.0)

    past = kv_len - query_len
    positions = past + tokens
    first_position = past + first_token
    # One more than the last position of the block, which is the number of keys its last token sees.
    num_keys = tl.minimum(first_position + BLOCK_TOKENS, kv_len)
    first_tile = 0
    if HAS_WINDOW:
        first_tile = tl.maximum(first_position - sliding_window + 1, 0) // BLOCK_N
    last_tile = tl.cdiv(num_keys, BLOCK_N)
    split = tl.program_id(2)
    if SPLIT:
        share = tl.cdiv(last_tile - first_tile, tl.num_programs(2))
        first_tile += split * share
        last_tile = tl.minimum(first_tile + share, last_tile)
    begin = first_tile * BLOCK_N
    end = last_tile * BLOCK_N

    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    if HAS_SINKS:
        # A sink is a key with a logit and no value; the first split counts it.
        logits = tl.load(sinks_ptr + heads, mask=owned, other=0.0).to(tl.float32) * LOG2E
        row_max = tl.where(split == 0, logits, row_max)
        row_sum += tl.where(split == 0, 1.0, 0.0)
    slopes = tl.zeros((BLOCK_M,), tl.float32)
    if HAS_ALIBI:
        slopes = tl.load(slopes_ptr + heads, mask=owned, other=0.0).to(tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)

    key_ptr = key_cache_ptr + kv_head.to(tl.int64) * stride_key_head
    value_ptr = value_cache_ptr + kv_head.to(tl.int64) * stride_value_head
    table_ptr = block_table_ptr + request.to(tl.int64) * stride_table
    if not HAS_WINDOW:
        # Tiles that every row sees whole need no mask.
        whole = tl.minimum((first_position + 1) // BLOCK_N * BLOCK_N, end)
        acc, row_max, row_sum = _attend_tiles(
            acc, row_max, row_sum, q, positions, slopes, key_ptr, value_ptr, table_ptr, begin, whole, num_keys,
            scaling, softcap, sliding_window, stride_key_slot, stride_value_slot,
            HEAD_DIM, V_HEAD_DIM, BLOCK_N, BLOCK_D, BLOCK_DV, BLOCK_SIZE,
            HAS_WINDOW, HAS_SOFTCAP, HAS_ALIBI, False, PRECISION,
        )  # fmt: skip
        begin = tl.maximum(begin, whole)
    acc, row_max, row_sum = _attend_tiles(
        acc, row_max, row_sum, q, positions, slopes, key_ptr, value_ptr, table_ptr, begin, end, num_keys,
        scaling, softcap, sliding_window, stride_key_slot, stride_value_slot,
        HEAD_DIM, V_HEAD_DIM, BLOCK_N, BLOCK_D, BLOCK_DV, BLOCK_SIZE,
        HAS_WINDOW, HAS_SOFTCAP, HAS_ALIBI, True, PRECISION,
    )  # fmt: skip

    # A split may hold no key of a row: its maximum and so its log-sum-exp are -inf, and its sum is 0.
    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
    acc = acc / row_sum[:, None]
    out_rows = flat_tokens * (NUM_KV_HEADS * GROUP) + heads
    if SPLIT:
        out_rows = out_rows * tl.num_programs(2) + split
        tl.store(lse_ptr + out_rows, row_max + tl.log2(row_sum), mask=owned)
    v_dims = tl.arange(0, BLOCK_DV)
    out_offsets = out_rows[:, None] * V_HEAD_DIM + v_dims[None, :]
    tl.store(
        out_ptr + out_offsets, acc.to(out_ptr.dtype.element_ty), mask=owned[:, None] & (v_dims[None, :] < V_HEAD_DIM)
    )


@triton.jit
def merge_kernel(
    partial_ptr,  # (total_q * num_heads, NUM_SPLITS, V_HEAD_DIM) float32
    lse_ptr,  # (total_q * num_heads, NUM_SPLITS) float32, base 2
    out_ptr,  # (total_q * num_heads, V_HEAD_DIM)
    NUM_SPLITS: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Merges the splits of one token and head, weighted by their log-sum-exp."""
    row = tl.program_id(0).to(tl.int64)
    splits = tl.arange(0, NUM_SPLITS)
    dims = tl.arange(0, BLOCK_DV)
    lse = tl.load(lse_ptr + row * NUM_SPLITS + splits)
    # Some split holds the row's own token, so the maximum is finite.
    weights = tl.exp2(lse - tl.max(lse, axis=0))
    weights = weights / tl.sum(weights, axis=0)
    offsets = (row * NUM_SPLITS + splits)[:, None] * V_HEAD_DIM + dims[None, :]
    partial = tl.load(partial_ptr + offsets, mask=dims[None, :] < V_HEAD_DIM, other=0.0)
    out = tl.sum(partial * weights[:, None], axis=0)
    tl.store(out_ptr + row * V_HEAD_DIM + dims, out.to(out_ptr.dtype.element_ty), mask=dims < V_HEAD_DIM)


def selective_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: RaggedBatch,
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor:
    """Launches the kernel; never waits for the device.

    Arguments, result and errors as in `orca_kernels.selective_attention`. Besides, `num_splits` says in how many parts
    (a power of two) each request's K/V is read; None chooses by the device and the lengths.

    Raises:
        ValueError: A head is wider than 256, or the caches' last dimension has another stride than 1.
    """
    if key_cache.stride(2) != 1 or value_cache.stride(2) != 1:
        raise ValueError(
            "The caches' last dimension must have stride 1, got "
            f"{key_cache.stride(2)} for key_cache and {value_cache.stride(2)} for value_cache."
        )
    if query.stride(2) != 1:
        query = query.contiguous()
    total_q, num_heads, head_dim = query.shape
    num_kv_heads, v_head_dim = value_cache.shape[1:]
    group = num_heads // num_kv_heads
    decode = batch.max_query_len * group <= DECODE_ROWS
    tile = choose_tile(head_dim, v_head_dim, query.dtype, decode=decode, amd=torch.version.hip is not None)
    shape = block_shape(tile, group)
    single_block = batch.max_query_len <= shape.tokens
    num_blocks = batch.num_requests if single_block else total_q // shape.tokens + batch.num_requests
    if num_splits is None and batch.batch_invariant:
        num_splits = 1
    elif num_splits is None:
        num_splits = _choose_splits(batch, query, tile, shape, num_kv_heads, v_head_dim, sliding_window)
    elif num_splits < 1 or num_splits & (num_splits - 1):
        raise ValueError(f"num_splits must be a power of two, got {num_splits}.")
    out = torch.empty(total_q, num_heads, v_head_dim, dtype=query.dtype, device=query.device)
    split = num_splits > 1
    partial = lse = None
    if split:
        partial = torch.empty(total_q, num_heads, num_splits, v_head_dim, dtype=torch.float32, device=query.device)
        lse = torch.empty(total_q, num_heads, num_splits, dtype=torch.float32, device=query.device)

    with torch.cuda.device_of(query):
        attention_kernel[(num_blocks, num_kv_heads * shape.head_blocks, num_splits)](
            query,
            key_cache,
            value_cache,
            partial if split else out,
            lse,
            batch.cu_seqlens_q,
            batch.kv_lens,
            batch.block_table,
            sinks,
            alibi_slopes,
            scaling,
            0.0 if softcap is None else softcap,
            0 if sliding_window is None else sliding_window,
            batch.num_requests,
            query.stride(0),
            query.stride(1),
            *key_cache.stride()[:2],
            *value_cache.stride()[:2],
            batch.block_table.stride(0),
            NUM_KV_HEADS=num_kv_heads,
            GROUP=group,
            HEADS_PER_BLOCK=shape.heads,
            BLOCK_TOKENS=shape.tokens,
            HEAD_DIM=head_dim,
            V_HEAD_DIM=v_head_dim,
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            BLOCK_D=max(16, next_power_of_two(head_dim)),
            BLOCK_DV=max(16, next_power_of_two(v_head_dim)),
            BLOCK_SIZE=batch.block_size,
            SINGLE_BLOCK=single_block,
            HAS_WINDOW=sliding_window is not None,
            HAS_SOFTCAP=softcap is not None,
            HAS_SINKS=sinks is not None,
            HAS_ALIBI=alibi_slopes is not None,
            SPLIT=split,
            # tf32 would keep 10 bits of a float32's 23.
            PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            enable_fp_fusion=True,
        )
        if split:
            merge_kernel[(total_q * num_heads,)](
                partial,
                lse,
                out,
                NUM_SPLITS=num_splits,
                V_HEAD_DIM=v_head_dim,
                BLOCK_DV=next_power_of_two(v_head_dim),
            )
    return out


def _choose_splits(
    batch: RaggedBatch,
    query: Tensor,
    tile: Tile,
    shape: BlockShape,
    num_kv_heads: int,
    v_head_dim: int,
    sliding_window: int | None,
) -> int:
    """Returns the number of K/V splits, from lengths known on the host; computed once per iteration."""
    name = ("triton", tile, shape, num_kv_heads, v_head_dim, sliding_window)
    if name not in batch.scratch:
        tiles_per_block = []
        for query_len, kv_len in zip(batch.query_lens_host, batch.kv_lens_host, strict=True):
            past = kv_len - query_len
            for token in range(0, query_len, shape.tokens):
                last = min(past + token + shape.tokens, kv_len)
                first = 0 if sliding_window is None else max(0, past + token - sliding_window + 1)
                tiles_per_block.append(-(-last // tile.block_n) - first // tile.block_n)
        row_bytes = batch.total_q * query.shape[1] * v_head_dim * 4
        batch.scratch[name] = num_kv_splits(
            tiles_per_block,
            num_kv_heads * shape.head_blocks,
            _num_processors(query.device.index),
            max_splits=min(64, _MAX_PARTIAL_BYTES // row_bytes),
        )
    splits: int = batch.scratch[name]
    return splits


@lru_cache
def _num_processors(device_index: int | None) -> int:
    # Without an index the tensor is on the CPU, and Triton's interpreter runs the kernel.
    return 1 if device_index is None else torch.cuda.get_device_properties(device_index).multi_processor_count
