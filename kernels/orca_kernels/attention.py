"""The two operations of the package, and the choice of who computes them."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from . import cpu, reference
from .ragged import RaggedBatch

BACKENDS = ("auto", "triton", "cpu", "reference")


def store_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, batch: RaggedBatch) -> None:
    """Writes the new tokens' K and V to their slots.

    Args:
        key: (total_q, num_kv_heads, head_dim), any strides.
        value: (total_q, num_kv_heads, v_head_dim), any strides.
        key_cache: (num_slots, num_kv_heads, head_dim); written in place.
        value_cache: (num_slots, num_kv_heads, v_head_dim); written in place.
        batch: The iteration.

    Raises:
        TypeError: The caches' dtype is not that of key and value.
        ValueError: A shape or a device does not fit.
    """
    _check_once(batch, "store_kv", key, value, key_cache, value_cache)
    if key.is_cuda:
        from . import triton_store

        triton_store.store_kv(key, value, key_cache, value_cache, batch)
    else:
        cpu.store_kv(key, value, key_cache, value_cache, batch)


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
    backend: str = "auto",
) -> Tensor:
    """Causal attention of every request in the batch over its own K/V; nobody sees a neighbour's.

    Args:
        query: (total_q, num_heads, head_dim), float32, bfloat16 or float16, any strides.
        key_cache: (num_slots, num_kv_heads, head_dim), query's dtype. The new tokens' K is there already
            (`store_kv`). Slots outside the batch's tokens may hold anything, NaN included.
        value_cache: (num_slots, num_kv_heads, v_head_dim), likewise.
        batch: The iteration; request i's queries sit at positions kv_len - query_len .. kv_len - 1.
        scaling: Factor of the scores.
        sliding_window: Key j is visible to the query at p iff p - sliding_window < j <= p.
        softcap: scores = softcap * tanh(scores / softcap), after scaling.
        sinks: (num_heads,): a logit per head that joins the softmax's denominator and has no value.
        alibi_slopes: (num_heads,): slope * (j - p) joins the score, after the softcap.
        backend: "triton", "cpu", "reference", or "auto": triton for a tensor on a GPU, else cpu.

    Returns:
        (total_q, num_heads, v_head_dim) in query's dtype; new memory.

    Raises:
        TypeError: The caches' dtype is not query's.
        ValueError: A shape, a device, an option or the backend does not fit.
    """
    _check_once(batch, "attention", query, None, key_cache, value_cache, sinks, alibi_slopes, sliding_window, softcap)
    if backend == "auto":
        backend = "triton" if query.device.type == "cuda" else "cpu"
    attend: Callable[..., Tensor]
    if batch.bounded and backend in ("cpu", "reference"):
        attend = reference.bounded_decodes
    elif backend == "cpu":
        attend = cpu.selective_attention
    elif backend == "triton":
        from . import triton_attention

        attend = triton_attention.selective_attention
    elif backend == "reference":
        attend = reference.selective_attention
    else:
        raise ValueError(f"Unknown backend {backend!r}; allowed are {', '.join(map(repr, BACKENDS))}.")
    return attend(
        query,
        key_cache,
        value_cache,
        batch,
        scaling=scaling,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
    )


def _check_once(
    batch: RaggedBatch,
    what: str,
    first: Tensor,
    second: Tensor | None,
    key_cache: Tensor,
    value_cache: Tensor,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> None:
    """Checks shapes once per iteration: the layers of a model hand in the same ones again and again."""
    signature = (
        what,
        first.shape,
        first.dtype,
        first.device,
        key_cache.shape,
        key_cache.dtype,
        value_cache.shape,
        value_cache.dtype,
        None if second is None else (second.shape, second.dtype),
        None if sinks is None else sinks.shape,
        None if alibi_slopes is None else alibi_slopes.shape,
        sliding_window,
        softcap,
    )
    checked = batch.scratch.setdefault("checked", set())
    if signature in checked:
        return
    _check_caches(batch, first, key_cache, value_cache)
    heads = first.shape[1]
    num_kv_heads = key_cache.shape[1]
    if second is not None:
        if heads != num_kv_heads:
            raise ValueError(f"key has {heads} heads, the cache {num_kv_heads}; they must be equal.")
        allowed = (batch.total_q, *value_cache.shape[1:])
        if tuple(second.shape) != allowed:
            raise ValueError(f"value must be {allowed}, got {tuple(second.shape)}.")
        if second.dtype != value_cache.dtype:
            raise TypeError(f"value is {second.dtype} but value_cache is {value_cache.dtype}; they must be equal.")
    elif heads % num_kv_heads:
        raise ValueError(f"num_heads must be a multiple of the cache's {num_kv_heads} K/V heads, got {heads}.")
    for name, per_head in (("sinks", sinks), ("alibi_slopes", alibi_slopes)):
        if per_head is not None and tuple(per_head.shape) != (heads,):
            raise ValueError(f"{name} must be ({heads},), one per head, got {tuple(per_head.shape)}.")
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window must be at least 1 or None, got {sliding_window}.")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be positive or None, got {softcap}.")
    checked.add(signature)


def _check_caches(batch: RaggedBatch, first: Tensor, key_cache: Tensor, value_cache: Tensor) -> None:
    if first.dim() != 3 or key_cache.dim() != 3 or value_cache.dim() != 3:
        raise ValueError(
            "query or key, key_cache and value_cache must have 3 dimensions (tokens or slots, heads, head_dim), got "
            f"{first.dim()}, {key_cache.dim()} and {value_cache.dim()}."
        )
    if first.shape[0] != batch.total_q:
        raise ValueError(f"The batch has {batch.total_q} new tokens, got {first.shape[0]} rows.")
    if first.shape[2] != key_cache.shape[2]:
        raise ValueError(f"head_dim is {first.shape[2]}, the key cache's is {key_cache.shape[2]}; they must be equal.")
    if key_cache.shape[:2] != value_cache.shape[:2]:
        raise ValueError(
            "key_cache and value_cache must agree in slots and heads, got "
            f"{tuple(key_cache.shape[:2])} and {tuple(value_cache.shape[:2])}."
        )
    if key_cache.shape[0] < batch.required_slots:
        raise ValueError(f"The batch names slots up to {batch.required_slots - 1}, the cache has {key_cache.shape[0]}.")
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        if cache.dtype != first.dtype:
            raise TypeError(f"{name} is {cache.dtype} but the new tokens are {first.dtype}; they must be equal.")
        if cache.device != first.device:
            raise ValueError(f"{name} is on {cache.device} but the new tokens are on {first.device}.")
    if batch.kv_lens.device != first.device:
        raise ValueError(f"The batch is on {batch.kv_lens.device}, the tokens on {first.device}; use batch.to(device).")
