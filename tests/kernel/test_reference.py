"""The oracle is right: against loops over single scores, and against torch's own attention."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from kernel_cases import BOUNDED_CASES, LARGE_CASES, SMALL_CASES, Case, Inputs, bounded, case_id, make, plain_attention
from torch import Tensor
from torch.nn import functional

from orca_kernels import selective_attention


def attend_by_loops(inputs: Inputs) -> Tensor:
    """One output at a time, in Python's floats."""
    query, key_cache, value_cache, batch = inputs.args
    scaling, window, softcap, sinks, slopes = inputs.options.values()
    num_heads, v_head_dim = query.shape[1], value_cache.shape[2]
    group = num_heads // key_cache.shape[1]
    size = batch.block_size
    out = torch.zeros(batch.total_q, num_heads, v_head_dim, dtype=torch.float64)
    row = 0
    for query_len, kv_len, owned in zip(batch.query_lens_host, batch.kv_lens_host, inputs.blocks, strict=True):
        for p in range(kv_len - query_len, kv_len):
            for head in range(num_heads):
                weights, values = [], []
                for j in range(p + 1):
                    if window is not None and j <= p - window:
                        continue
                    slot = owned[j // size] * size + j % size
                    score = scaling * torch.dot(query[row, head].double(), key_cache[slot, head // group].double())
                    score = score.item()
                    if softcap is not None:
                        score = softcap * math.tanh(score / softcap)
                    if slopes is not None:
                        score += slopes[head].item() * (j - p)
                    weights.append(math.exp(score))
                    values.append(value_cache[slot, head // group].double())
                total = sum(weights) + (0.0 if sinks is None else math.exp(sinks[head].item()))
                for weight, value in zip(weights, values, strict=True):
                    out[row, head] += weight / total * value
            row += 1
    return out


@pytest.mark.parametrize(
    "case",
    [
        Case("mixture", [(1, 7), (3, 5), (2, 2)], head_dim=8, block_size=3),
        Case("mqa", [(2, 6)], heads=(4, 1), head_dim=8, block_size=2),
        Case("everything", [(1, 7), (4, 9)], head_dim=8, block_size=4, window=3, softcap=2.0, sinks=True, alibi=True),
    ],
    ids=case_id,
)
def test_reference_equals_loops(case: Case) -> None:
    inputs = make(case, torch.float32)
    out = selective_attention(*inputs.args, **inputs.options, backend="reference")
    torch.testing.assert_close(out.double(), attend_by_loops(inputs), rtol=1e-5, atol=1e-6)


def test_reference_equals_sdpa_on_whole_prompts() -> None:
    inputs = make(Case("prompts", [(9, 9), (21, 21)], heads=(6, 2)), torch.float32)
    out = selective_attention(*inputs.args, **inputs.options, backend="reference")
    offset = 0
    for length, owned in zip(inputs.batch.query_lens_host, inputs.blocks, strict=True):
        slots = [owned[j // 16] * 16 + j % 16 for j in range(length)]
        q = inputs.query[offset : offset + length].transpose(0, 1)
        k, v = (cache[slots].transpose(0, 1) for cache in (inputs.key_cache, inputs.value_cache))
        expected = functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)[
            0
        ]
        torch.testing.assert_close(out[offset : offset + length], expected.transpose(0, 1), rtol=1e-5, atol=1e-6)
        offset += length


@pytest.mark.parametrize("case", SMALL_CASES + LARGE_CASES, ids=case_id)
def test_reference_equals_eager_attention(case: Case) -> None:
    inputs = make(case, torch.float32)
    out = selective_attention(*inputs.args, **inputs.options, backend="reference")
    torch.testing.assert_close(out, plain_attention(inputs, torch.float32), rtol=1e-5, atol=1e-5)


def test_reference_accumulates_in_float64_for_float64() -> None:
    inputs = make(Case("double", [(3, 8)]), torch.float64)
    out = selective_attention(*inputs.args, **inputs.options, backend="reference")
    torch.testing.assert_close(out, attend_by_loops(inputs), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("case", BOUNDED_CASES, ids=case_id)
def test_decodes_of_unknown_lengths_equal_eager_attention(case: Case, backend: str) -> None:
    inputs = make(case, torch.float32)
    out = selective_attention(*bounded(inputs).args, **inputs.options, backend=backend)
    torch.testing.assert_close(out, plain_attention(inputs, torch.float32), rtol=1e-5, atol=1e-5)


def test_lengths_are_read_when_it_runs() -> None:
    inputs = make(Case("decodes", [(1, 40), (1, 21)]), torch.float32)
    args = bounded(inputs).args
    args[3].kv_lens.copy_(torch.tensor([7, 21]))
    out = selective_attention(*args, **inputs.options)
    shorter = replace(inputs, batch=replace(inputs.batch, kv_lens_host=(7, 21)))
    torch.testing.assert_close(out, plain_attention(shorter, torch.float32), rtol=1e-5, atol=1e-5)
