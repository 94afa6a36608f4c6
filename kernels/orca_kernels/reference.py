"""Selective attention in plain torch: slow, obvious, the oracle of every other backend."""

from __future__ import annotations

import torch
from torch import Tensor

from .ragged import RaggedBatch


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
) -> Tensor:
    """Attends request by request, as the paper's Split and Merge do (section 3.2), in float32 or float64.

    Args:
        query: (total_q, num_heads, head_dim).
        key_cache: (num_slots, num_kv_heads, head_dim).
        value_cache: (num_slots, num_kv_heads, v_head_dim).
        batch: The iteration.
        scaling: Factor of the scores.
        sliding_window: Key j is visible to the query at p iff p - sliding_window < j <= p.
        softcap: scores = softcap * tanh(scores / softcap), after scaling.
        sinks: (num_heads,): a logit per head that joins the softmax's denominator and has no value.
        alibi_slopes: (num_heads,): slope * (j - p) joins the score, after the softcap.

    Returns:
        (total_q, num_heads, v_head_dim) in query's dtype.
    """
    compute_dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    group = query.shape[1] // key_cache.shape[1]
    outputs = []
    offset = 0
    for index, (query_len, kv_len) in enumerate(zip(batch.query_lens_host, batch.kv_lens_host, strict=True)):
        slots = request_slots(batch, index)
        # (heads, tokens, dim) from here on.
        q = query[offset : offset + query_len].to(compute_dtype).transpose(0, 1)
        k = key_cache[slots].to(compute_dtype).repeat_interleave(group, dim=1).transpose(0, 1)
        v = value_cache[slots].to(compute_dtype).repeat_interleave(group, dim=1).transpose(0, 1)
        offset += query_len

        scores = scaling * (q @ k.transpose(1, 2))
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        j = torch.arange(kv_len, dtype=torch.int64, device=query.device)[None, :]
        p = j.T[kv_len - query_len :]
        if alibi_slopes is not None:
            scores = scores + alibi_slopes.to(compute_dtype)[:, None, None] * (j - p)
        visible = j <= p
        if sliding_window is not None:
            visible = visible & (j > p - sliding_window)
        scores = scores.masked_fill(~visible, float("-inf"))
        if sinks is not None:
            extra = sinks.to(compute_dtype)[:, None, None].expand(-1, query_len, 1)
            weights = torch.cat([scores, extra], dim=-1).softmax(dim=-1)[..., :-1]
        else:
            weights = scores.softmax(dim=-1)
        outputs.append((weights @ v).transpose(0, 1))
    return torch.cat(outputs).to(query.dtype)


def bounded_decodes(
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
) -> Tensor:
    """The same for a `bounded` batch, of which it reads tensors alone: what it does is the same for all lengths."""
    compute_dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    num_requests, num_heads, _ = query.shape
    group = num_heads // key_cache.shape[1]
    j = torch.arange(batch.max_kv_len, dtype=torch.int64, device=query.device)[None, :]
    p = batch.kv_lens[:, None] - 1
    slots = batch.block_table.to(torch.int64)[:, j[0] // batch.block_size] * batch.block_size + j % batch.block_size
    visible = j <= p
    if sliding_window is not None:
        visible = visible & (j > p - sliding_window)
    # What is not visible may be NaN, or no slot at all.
    k, v = (
        cache[slots.where(visible, 0)].to(compute_dtype).where(visible[:, :, None, None], 0)
        for cache in (key_cache, value_cache)
    )
    q = query.to(compute_dtype).unflatten(1, (-1, group))
    scores = scaling * torch.einsum("rhgd,rkhd->rhgk", q, k).flatten(1, 2)  # (num_requests, num_heads, max_kv_len)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        scores = scores + alibi_slopes.to(compute_dtype)[None, :, None] * (j - p)[:, None, :]
    scores = scores.where(visible[:, None, :], float("-inf"))
    if sinks is not None:
        extra = sinks.to(compute_dtype)[None, :, None].expand(num_requests, -1, 1)
        weights = torch.cat([scores, extra], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    return torch.einsum("rhgk,rkhd->rhgd", weights.unflatten(1, (-1, group)), v).flatten(1, 2).to(query.dtype)


def request_slots(batch: RaggedBatch, index: int) -> Tensor:
    """Returns (kv_len,) int64: the slots of one request's K/V, in order of position."""
    positions = torch.arange(batch.kv_lens_host[index], dtype=torch.int64, device=batch.block_table.device)
    blocks = batch.block_table[index].to(torch.int64)[positions // batch.block_size]
    return blocks * batch.block_size + positions % batch.block_size
