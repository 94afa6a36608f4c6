"""The CPU backend: one pass over the requests, on views of the caches.

Equal to the reference. Decodes, and requests with a few query rows, run in one call of the compiled kernels where
these are loaded; everything else, and everything where they are not, is PyTorch's. Whatever does not depend on the
layer (spans, masks, slot indices) is computed at an iteration's first layer and kept in `RaggedBatch.scratch`: this
code runs layers x requests times per iteration.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from .compiled import DECODE_DTYPES, library, loaded
from .ragged import RaggedBatch
from .reference import request_slots

# Rows of a prompt that attend together where a mask is needed; bounds the mask at _TILE x max_kv_len.
_TILE = 256
# Query rows of a request up to which the compiled kernel, which reads its K/V anew for each, beats SDPA.
_FEW = 8


@dataclass(slots=True)
class _Span:
    """Query rows of one request, and the K/V that they see.

    Attributes:
        start: First row in the flat batch.
        rows: Number of rows.
        kv_len: Number of keys that some row sees.
        first_slot: Slot of the first of them; the others follow, unless `slots` says otherwise.
        slots: (kv_len,) int64: their slots, where these are not consecutive; else None.
        is_short: It is all of its request's query rows, and few.
        is_causal: SDPA's own causal mask is the whole mask.
        bias: Added to the scores: (rows, kv_len), (num_kv_heads, group, rows, kv_len), or None for nothing.
    """

    start: int
    rows: int
    kv_len: int
    first_slot: int
    slots: Tensor | None
    is_short: bool
    is_causal: bool
    bias: Tensor | None = None


@dataclass(slots=True)
class _Plan:
    """What the layers of an iteration share.

    Attributes:
        spans: In flat order; without the short ones where the compiled kernels take these.
        queries: (3, num_queries) int32: what they take, as `Library.decode` wants it.
        slopes: The ALiBi slopes; held so that their address, which names the plan, stays theirs.
        sections: Where every span is a decode over slots of its own: sizes that cut the caches into gap, K/V, gap, ...
        places: For each span, which section holds its K/V.
    """

    spans: list[_Span]
    slopes: Tensor | None
    queries: Tensor | None = None
    sections: list[int] | None = None
    places: list[int] = field(default_factory=list)


def store_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, batch: RaggedBatch) -> None:
    """Writes the new tokens' K and V to their slots; shapes as in `orca_kernels.store_kv`."""
    kernels = None if batch.bounded else loaded()  # what records a bounded batch's work sees PyTorch's operations alone
    if kernels is not None and all(
        rows.stride(2) == cache.stride(2) == 1 and rows.dtype is cache.dtype
        for rows, cache in ((key, key_cache), (value, value_cache))
    ):
        kernels.store(key, value, key_cache, value_cache, batch.slot_mapping)
        return
    if batch.num_requests == 1 and batch.first_slots[0] is not None:
        end = batch.first_slots[0] + batch.kv_lens_host[0]
        start = end - batch.query_lens_host[0]
        key_cache[start:end].copy_(key)
        value_cache[start:end].copy_(value)
        return
    key_cache.index_copy_(0, batch.slot_mapping, key)
    value_cache.index_copy_(0, batch.slot_mapping, value)


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
    """Attends request by request; arguments, result and errors as in `orca_kernels.selective_attention`."""
    # SDPA has neither sinks nor a softcap, and would copy K/V where the value's width is its own.
    explicit = softcap is not None or sinks is not None or key_cache.shape[2] != value_cache.shape[2]
    compiled = None
    if query.dtype in DECODE_DTYPES and min(batch.query_lens_host) <= _FEW:
        # Whether the kernels are loaded by now must make no difference where not a bit may differ.
        compiled = library() if batch.batch_invariant else loaded()
    plan = _plan(batch, query.dtype, key_cache, sliding_window, alibi_slopes, explicit, compiled is not None)
    if query.stride(2) != 1:
        query = query.contiguous()

    if plan.sections is not None:
        return _decode_all(query, key_cache, value_cache, plan, plan.sections, scaling)
    out = torch.empty(*query.shape[:2], value_cache.shape[2], dtype=query.dtype, device=query.device)
    if compiled is not None and plan.queries is not None:
        compiled.decode(
            query,
            key_cache,
            value_cache,
            batch,
            plan.queries,
            out,
            scaling=scaling,
            sliding_window=sliding_window,
            softcap=softcap,
            sinks=None if sinks is None else sinks.to(torch.float32).contiguous(),
            alibi_slopes=None if alibi_slopes is None else alibi_slopes.to(torch.float32).contiguous(),
        )

    if not plan.spans:
        return out
    # (num_kv_heads, group, tokens, head_dim): a group's heads stand next to the K/V head that they share.
    num_kv_heads = key_cache.shape[1]
    group = query.shape[1] // num_kv_heads
    grouped = query.view(-1, num_kv_heads, group, query.shape[2]).permute(1, 2, 0, 3)
    keys, values = key_cache.transpose(0, 1), value_cache.transpose(0, 1)
    for span in plan.spans:
        q = grouped.narrow(2, span.start, span.rows)
        if span.slots is None:
            k, v = keys.narrow(1, span.first_slot, span.kv_len), values.narrow(1, span.first_slot, span.kv_len)
        else:
            k = key_cache.index_select(0, span.slots).transpose(0, 1)
            v = value_cache.index_select(0, span.slots).transpose(0, 1)
        if explicit:
            attended = _explicit(q, k, v, span.bias, scaling, softcap, sinks)
        elif span.rows == 1:
            attended = _decode(q, k, v, span.bias, scaling)
        else:
            attended = _prefill(q, k, v, span, scaling)
        target = out[span.start : span.start + span.rows].unflatten(1, (num_kv_heads, group))
        target.copy_(attended.permute(2, 0, 1, 3))
    return out


def _decode_all(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, plan: _Plan, sections: list[int], scaling: float
) -> Tensor:
    """Decodes only: one call makes all the views of a cache, which otherwise cost as much as a short attention."""
    num_kv_heads = key_cache.shape[1]
    total_q, num_heads, head_dim = query.shape
    rows = query.view(total_q, 1, num_kv_heads, -1, head_dim).unbind(0)
    keys = key_cache.transpose(0, 1).unsqueeze(0).split_with_sizes(sections, 2)
    values = value_cache.transpose(0, 1).unsqueeze(0).split_with_sizes(sections, 2)
    attend = functional.scaled_dot_product_attention
    outputs = [
        attend(q, keys[place], values[place], attn_mask=span.bias, scale=scaling)
        for q, place, span in zip(rows, plan.places, plan.spans, strict=True)
    ]
    return torch.cat(outputs).view(total_q, num_heads, -1)


def _decode(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scaling: float) -> Tensor:
    """One token: its group's heads are the query rows, so that K and V are read once for all of them."""
    out = functional.scaled_dot_product_attention(
        q.squeeze(2).unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), attn_mask=bias, scale=scaling
    )
    return out.squeeze(0).unsqueeze(2)


def _prefill(q: Tensor, k: Tensor, v: Tensor, span: _Span, scaling: float) -> Tensor:
    """Several tokens. K/V heads stand for SDPA's batch; a stride of 0 repeats them over the group without a copy."""
    num_kv_heads, group = q.shape[:2]
    return functional.scaled_dot_product_attention(
        q,
        k.unsqueeze(1).expand(num_kv_heads, group, span.kv_len, k.shape[2]),
        v.unsqueeze(1).expand(num_kv_heads, group, span.kv_len, v.shape[2]),
        attn_mask=span.bias,
        is_causal=span.is_causal,
        scale=scaling,
    )


def _explicit(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scaling: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Attention written out. q: (num_kv_heads, group, rows, head_dim); k, v: (num_kv_heads, kv_len, dim)."""
    num_kv_heads, group, rows, _ = q.shape
    compute_dtype = torch.promote_types(q.dtype, torch.float32)
    scores = torch.bmm(q.flatten(1, 2), k.transpose(1, 2)).to(compute_dtype).mul_(scaling)
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    scores = scores.view(num_kv_heads, group, rows, -1)
    if bias is not None:
        scores = scores.add_(bias)
    if sinks is None:
        weights = scores.softmax(dim=-1)
    else:
        extra = sinks.to(compute_dtype).view(num_kv_heads, group, 1, 1)
        weights = scores.sub_(torch.logaddexp(scores.logsumexp(dim=-1, keepdim=True), extra)).exp_()
    return torch.bmm(weights.to(v.dtype).flatten(1, 2), v).view(num_kv_heads, group, rows, -1)


def _plan(
    batch: RaggedBatch,
    dtype: torch.dtype,
    key_cache: Tensor,
    sliding_window: int | None,
    alibi_slopes: Tensor | None,
    explicit: bool,
    compiled: bool,
) -> _Plan:
    num_slots, num_kv_heads, _ = key_cache.shape
    address = None if alibi_slopes is None else alibi_slopes.data_ptr()
    name = ("cpu", dtype, num_slots, num_kv_heads, sliding_window, address, explicit, compiled)
    known: _Plan | None = batch.scratch.get(name)
    if known is not None:
        return known
    spans = _cut(batch, sliding_window, masked=explicit or alibi_slopes is not None)
    queries = None
    if compiled:
        queries = _short_queries(batch)
        spans = [span for span in spans if not span.is_short]
    # SDPA wants a mask of the query's dtype; written out, scores are in float32 at least.
    bias_dtype = torch.promote_types(dtype, torch.float32) if explicit else dtype
    _add_biases(spans, sliding_window, alibi_slopes, num_kv_heads, bias_dtype)
    plan = _Plan(spans, alibi_slopes, queries)
    if not explicit:
        for span in spans:
            if span.rows == 1 and span.bias is not None:
                span.bias = span.bias.squeeze(2).unsqueeze(0)
        if not compiled:
            _add_sections(plan, num_slots)
    batch.scratch[name] = plan
    return plan


def _short_queries(batch: RaggedBatch) -> Tensor:
    """(3, num) int32: for each query of the requests with few of them its row, its request, and the keys it sees."""
    queries = []
    row = 0
    for request, (query_len, kv_len) in enumerate(zip(batch.query_lens_host, batch.kv_lens_host, strict=True)):
        if query_len <= _FEW:
            queries += [(row + i, request, kv_len - query_len + i + 1) for i in range(query_len)]
        row += query_len
    return torch.tensor(queries, dtype=torch.int32, device="cpu").T.contiguous()


def _add_sections(plan: _Plan, num_slots: int) -> None:
    """Fills in `sections` and `places` where the plan is such that they can be."""
    places = [0] * len(plan.spans)
    sections = []
    end = 0
    for index, span in sorted(enumerate(plan.spans), key=lambda item: item[1].first_slot):
        start = span.first_slot
        # Requests that share slots, or whose slots are scattered, are read one by one.
        if span.rows > 1 or start < end:
            return
        sections += [start - end, span.kv_len]
        places[index] = len(sections) - 1
        end = start + span.kv_len
    plan.sections = [*sections, num_slots - end]
    plan.places = places


def _cut(batch: RaggedBatch, sliding_window: int | None, *, masked: bool) -> list[_Span]:
    """Cuts the requests into spans; `masked` says that a mask or bias is wanted whatever the lengths."""
    spans = []
    start = 0
    for index, (query_len, kv_len) in enumerate(zip(batch.query_lens_host, batch.kv_lens_host, strict=True)):
        window = kv_len if sliding_window is None else min(sliding_window, kv_len)
        is_causal = query_len == kv_len == window and query_len > 1 and not masked
        step = query_len if is_causal else _TILE
        first_slot = batch.first_slots[index]
        slots = None
        if first_slot is None:
            # -1 sorts before every slot, so that `_add_sections` meets it first.
            slots, first_slot = request_slots(batch, index), -1
        for row in range(0, query_len, step):
            rows = min(step, query_len - row)
            position = kv_len - query_len + row
            begin, end = max(0, position - window + 1), position + rows
            spans.append(
                _Span(
                    start=start + row,
                    rows=rows,
                    kv_len=end - begin,
                    first_slot=first_slot + begin if slots is None else -1,
                    slots=None if slots is None else slots[begin:end],
                    is_short=query_len <= _FEW,
                    is_causal=is_causal,
                )
            )
        start += query_len
    return spans


def _add_biases(
    spans: list[_Span],
    sliding_window: int | None,
    alibi_slopes: Tensor | None,
    num_kv_heads: int,
    dtype: torch.dtype,
) -> None:
    """Gives each span its mask and ALiBi bias.

    Both depend on j - p alone. So one matrix, aligned at its lower right corner, serves every span of every request:
    each takes the corner of its own size.
    """
    # A single row sees all of its span's keys: `_cut` left the others out.
    biased = [span for span in spans if not span.is_causal and (span.rows > 1 or alibi_slopes is not None)]
    if not biased:
        return
    max_rows, max_kv_len = max(span.rows for span in biased), max(span.kv_len for span in biased)
    j = torch.arange(max_kv_len, dtype=torch.int64, device="cpu")
    p = j[max_kv_len - max_rows :, None]
    distance = j[None, :] - p
    hidden = distance > 0
    if sliding_window is not None:
        hidden |= distance <= -sliding_window
    if alibi_slopes is None:
        matrix = torch.zeros(max_rows, max_kv_len, dtype=dtype, device="cpu")
    else:
        slopes = alibi_slopes.to(torch.promote_types(dtype, torch.float32)).view(num_kv_heads, -1, 1, 1)
        matrix = (slopes * distance).to(dtype)
    matrix.masked_fill_(hidden, float("-inf"))
    for span in biased:
        span.bias = matrix[..., max_rows - span.rows :, max_kv_len - span.kv_len :]
