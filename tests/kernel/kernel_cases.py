"""Cases that every backend must get right, and the plain code that says what right is."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from orca_kernels import RaggedBatch

NAN = float("nan")


@dataclass(frozen=True, slots=True)
class Case:
    """A ragged batch, the model's heads, and the options of attention (`sinks` and `alibi` as flags)."""

    name: str
    lens: Sequence[tuple[int, int]]  # (query_len, kv_len)
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 64
    v_head_dim: int | None = None
    block_size: int = 16
    consecutive: bool = False
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    alibi: bool = False

    def __str__(self) -> str:
        return self.name


@dataclass(slots=True)
class Inputs:
    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    batch: RaggedBatch
    blocks: list[list[int]]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def args(self) -> tuple[Tensor, Tensor, Tensor, RaggedBatch]:
        return self.query, self.key_cache, self.value_cache, self.batch


EVERYTHING: dict[str, Any] = {"softcap": 4.0, "sinks": True, "alibi": True}
MIXED = [(1, 37), (5, 18), (9, 9), (1, 1), (12, 70)]
DECODES = [(1, 1), (1, 16), (1, 17), (1, 63)]

# Small enough for Triton's interpreter.
SMALL_CASES = [
    Case("mixture", MIXED),
    Case("mixture_mha", MIXED, heads=(3, 3), head_dim=32),
    Case("mixture_mqa", MIXED, heads=(5, 1), head_dim=32),
    Case("consecutive", MIXED, consecutive=True),
    Case("decodes", DECODES, heads=(9, 3)),
    Case("one_token", [(1, 1)]),
    Case("prefills", [(33, 33), (17, 17), (1, 1)], head_dim=32),
    Case("chunk_ends_at_block", [(16, 48), (16, 16), (1, 33)], head_dim=32),
    Case("head_dim_80", [(3, 20), (1, 40)], head_dim=80),
    Case("head_dim_96", [(3, 20), (1, 40)], head_dim=96),
    Case("head_dim_128", [(2, 35), (1, 9)], head_dim=128),
    Case("head_dim_256", [(2, 35), (1, 9)], head_dim=256),
    Case("narrow_values", [(3, 20), (1, 40)], head_dim=64, v_head_dim=32),
    Case("wide_values", [(3, 20), (1, 40)], head_dim=32, v_head_dim=48),
    Case("block_size_1", [(3, 9), (1, 5)], head_dim=32, block_size=1),
    Case("block_size_5", [(3, 19), (1, 11)], head_dim=32, block_size=5),
    Case("window", MIXED, window=7, head_dim=32),
    Case("window_of_1", [(4, 9), (1, 5)], window=1, head_dim=32),
    Case("window_longer_than_kv", MIXED, window=1000, head_dim=32),
    Case("window_decode", [(1, 200), (1, 130)], window=20, head_dim=32, consecutive=True),
    Case("softcap", MIXED, softcap=3.0, head_dim=32),
    Case("sinks", MIXED, sinks=True, head_dim=32),
    Case("alibi", MIXED, alibi=True, head_dim=32),
    Case("alibi_decode", DECODES, alibi=True, head_dim=32, consecutive=True),
    Case("everything", MIXED, window=11, head_dim=32, **EVERYTHING),
    Case("many_heads_per_group", [(3, 20), (1, 40)], heads=(71, 1), head_dim=32),
]
SPLIT_CASES = [
    Case("decodes", DECODES, heads=(9, 3)),
    Case("mixture", MIXED, head_dim=32),
    Case("window", MIXED, head_dim=32, window=7),
    Case("everything", MIXED, head_dim=32, window=11, **EVERYTHING),
    Case("long_decode", [(1, 700), (2, 90)], head_dim=32),
]
# Decodes of which the host knows no more than that their K/V are not longer than this.
BOUND = 256
BOUNDED_CASES = [
    Case("decodes", DECODES, heads=(9, 3)),
    Case("window", [(1, 200), (1, 130), (1, 1)], window=20, head_dim=32),
    Case("everything", [(1, 200), (1, 5)], head_dim=32, window=150, **EVERYTHING),
    Case("narrow_values", [(1, 20), (1, 40)], v_head_dim=32, block_size=5),
]
STORE_CASES = [
    Case("store", [(4, 9), (1, 3)], heads=(5, 5), head_dim=8, block_size=4),
    Case("store_widths", [(4, 9)], heads=(3, 3), head_dim=8, v_head_dim=5, block_size=4),
]
# name -> (what, case, dtype, K/V splits), for Triton's interpreter, which is wrong for bfloat16.
INTERPRETED: dict[str, tuple[str, Case, torch.dtype, int | None]] = {
    **{f"{case}-fp32": ("attend", case, torch.float32, None) for case in SMALL_CASES},
    **{f"{case}-fp16": ("attend", case, torch.float16, None) for case in SMALL_CASES},
    **{f"{case}-{n}_splits": ("attend", case, torch.float32, n) for case in SPLIT_CASES for n in (2, 8)},
    **{f"bounded_{case}-{n}_splits": ("bounded", case, torch.float32, n) for case in BOUNDED_CASES for n in (None, 8)},
    **{str(case): ("store", case, torch.float32, None) for case in STORE_CASES},
}
LARGE_CASES = [
    Case("vllm", [(1, 1328), (5, 18), (129, 463)], heads=(8, 2)),
    Case("vllm_consecutive", [(1, 1328), (5, 18), (129, 463)], heads=(8, 2), consecutive=True),
    Case("vllm_everything", [(1, 1328), (5, 18), (129, 463)], heads=(8, 2), window=100, **EVERYTHING),
    Case("long_window", [(700, 900), (600, 600)], heads=(4, 1), head_dim=32, window=64, consecutive=True),
    Case("long_chunk", [(513, 1025)], heads=(6, 2), head_dim=32, consecutive=True),
    Case("long_alibi", [(300, 300), (257, 600), (1, 555)], heads=(4, 4), alibi=True),
    Case("long_decodes", [(1, 2048), (1, 1), (1, 777)], heads=(9, 3), consecutive=True),
]


def case_id(case: Case) -> str:
    return case.name


def make(case: Case, dtype: torch.dtype, device: str = "cpu") -> Inputs:
    """Returns random inputs; every slot that holds no token of a request is NaN in both caches."""
    generator = random.Random(case.name)
    torch.manual_seed(generator.randrange(1 << 30))
    # One block more than the tokens need, and blocks that are nobody's between them.
    counts = [-(-kv_len // case.block_size) + 1 for _, kv_len in case.lens]
    ids = list(range(sum(counts) + len(counts) + 1))
    if not case.consecutive:
        generator.shuffle(ids)
    blocks, start = [], 1
    for count in counts:
        blocks.append(ids[start : start + count])
        start += count + 1
    batch = RaggedBatch.build(
        query_lens=[query_len for query_len, _ in case.lens],
        kv_lens=[kv_len for _, kv_len in case.lens],
        blocks=blocks,
        block_size=case.block_size,
        device=device,
    )
    num_heads, num_kv_heads = case.heads
    v_head_dim = case.v_head_dim or case.head_dim
    num_slots = len(ids) * case.block_size
    key_cache = torch.full((num_slots, num_kv_heads, case.head_dim), NAN)
    value_cache = torch.full((num_slots, num_kv_heads, v_head_dim), NAN)
    for (_, kv_len), owned in zip(case.lens, blocks, strict=True):
        for position in range(kv_len):
            slot = owned[position // case.block_size] * case.block_size + position % case.block_size
            key_cache[slot] = torch.randn(num_kv_heads, case.head_dim)
            value_cache[slot] = torch.randn(num_kv_heads, v_head_dim)
    # Not contiguous, as a model's (batch, heads, tokens, dim) is when it is flattened.
    query = torch.randn(num_heads, batch.total_q, case.head_dim).to(device, dtype).transpose(0, 1)
    options: dict[str, Any] = {"scaling": case.head_dim**-0.5, "sliding_window": case.window, "softcap": case.softcap}
    options["sinks"] = torch.randn(num_heads).to(device, dtype) if case.sinks else None
    options["alibi_slopes"] = (torch.rand(num_heads) / 4).to(device) if case.alibi else None
    return Inputs(query, key_cache.to(device, dtype), value_cache.to(device, dtype), batch, blocks, options)


def bounded(inputs: Inputs) -> Inputs:
    """The same decodes without their lengths; what their block table says past their blocks is NaN in the caches."""
    batch = inputs.batch
    table = torch.zeros(batch.num_requests, -(-BOUND // batch.block_size), dtype=torch.int32)
    for row, kv_len, owned in zip(table, batch.kv_lens_host, inputs.blocks, strict=True):
        used = -(-kv_len // batch.block_size)
        row[:used] = torch.tensor(owned[:used])
    decodes = RaggedBatch.decodes(
        kv_lens=batch.kv_lens,
        slot_mapping=batch.slot_mapping,
        block_table=table.to(batch.kv_lens.device),
        block_size=batch.block_size,
        max_kv_len=BOUND,
    )
    return replace(inputs, batch=decodes)


def plain_attention(inputs: Inputs, dtype: torch.dtype) -> Tensor:
    """Attention in `dtype` throughout, with K/V repeated and scores masked: what a model's eager code does."""
    scaling, window, softcap, sinks, slopes = inputs.options.values()
    num_heads, num_kv_heads = inputs.query.shape[1], inputs.key_cache.shape[1]
    head_map = [head // (num_heads // num_kv_heads) for head in range(num_heads)]
    outputs, offset = [], 0
    for query_len, kv_len, owned in zip(
        inputs.batch.query_lens_host, inputs.batch.kv_lens_host, inputs.blocks, strict=True
    ):
        size = inputs.batch.block_size
        slots = [owned[j // size] * size + j % size for j in range(kv_len)]
        q = inputs.query[offset : offset + query_len].to(dtype).transpose(0, 1)
        k = inputs.key_cache[slots].to(dtype)[:, head_map].transpose(0, 1)
        v = inputs.value_cache[slots].to(dtype)[:, head_map].transpose(0, 1)
        offset += query_len
        scores = torch.matmul(q, k.transpose(1, 2)) * scaling
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        distance = torch.arange(kv_len) - torch.arange(kv_len - query_len, kv_len)[:, None]
        distance = distance.to(q.device)
        if slopes is not None:
            scores = scores + (slopes[:, None, None] * distance).to(dtype)
        hidden = distance > 0 if window is None else (distance > 0) | (distance <= -window)
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks.to(dtype)[:, None, None].expand(-1, query_len, 1)], dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., :kv_len]
        outputs.append(torch.matmul(weights, v).transpose(0, 1))
    return torch.cat(outputs)


def error_and_bound(inputs: Inputs, out: Tensor) -> tuple[float, float]:
    """Returns the largest error of `out`, and what is allowed: twice that of torch in the same dtype, plus 1e-5."""
    exact = plain_attention(inputs, torch.float32)
    plain = plain_attention(inputs, inputs.query.dtype).float()
    assert bool(exact.isfinite().all()), "the case itself reads poisoned memory"
    return (out.float() - exact).abs().max().item(), 2 * (plain - exact).abs().max().item() + 1e-5
