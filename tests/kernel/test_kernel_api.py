"""What the two public operations refuse, what they import, and how work is cut for a GPU."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_cases import MIXED, Case, make

from orca_kernels import RaggedBatch, selective_attention, store_kv
from orca_kernels.tiles import TILES, block_shape, choose_tile, num_kv_splits

KERNELS = Path(__file__).parents[2] / "kernels"
BATCH: dict[str, Any] = {"query_lens": [2], "kv_lens": [5], "blocks": [[1, 2]], "block_size": 4, "device": "cpu"}


def arguments() -> dict[str, Any]:
    return {
        "query": torch.randn(2, 4, 8),
        "key_cache": torch.randn(12, 2, 8),
        "value_cache": torch.randn(12, 2, 6),
        "batch": RaggedBatch.build(**BATCH),
        "scaling": 1.0,
    }


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("query", torch.randn(3, 4, 8), ValueError, "has 2 new tokens, got 3 rows"),
        ("query", torch.randn(2, 3, 8), ValueError, "multiple of the cache's 2 K/V heads, got 3"),
        ("query", torch.randn(2, 4, 9), ValueError, "head_dim is 9, the key cache's is 8"),
        ("query", torch.randn(2, 32), ValueError, "must have 3 dimensions"),
        ("query", torch.randn(2, 4, 8).half(), TypeError, "key_cache is torch.float32 .* torch.float16"),
        ("value_cache", torch.randn(12, 2, 6).half(), TypeError, "value_cache is torch.float16 .* torch.float32"),
        ("value_cache", torch.randn(11, 2, 6), ValueError, "agree in slots and heads"),
        ("sinks", torch.randn(2), ValueError, r"sinks must be \(4,\), one per head, got \(2,\)"),
        ("alibi_slopes", torch.randn(4, 1), ValueError, r"alibi_slopes must be \(4,\)"),
        ("sliding_window", 0, ValueError, "sliding_window must be at least 1 or None, got 0"),
        ("softcap", 0.0, ValueError, "softcap must be positive or None, got 0.0"),
        ("backend", "cuda", ValueError, "Unknown backend 'cuda'; allowed are 'auto', 'triton', 'cpu', 'reference'"),
        ("batch", RaggedBatch.build(**BATCH | {"blocks": [[1, 7]]}), ValueError, "slots up to 31, the cache has 12"),
    ],
)
def test_attention_refuses(name: str, value: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        selective_attention(**(arguments() | {name: value}))


@pytest.mark.parametrize(
    ("key", "value", "error", "message"),
    [
        (torch.randn(2, 4, 8), torch.randn(2, 2, 6), ValueError, "key has 4 heads, the cache 2"),
        (torch.randn(2, 2, 8), torch.randn(2, 2, 8), ValueError, r"value must be \(2, 2, 6\), got \(2, 2, 8\)"),
        (torch.randn(2, 2, 8).half(), torch.randn(2, 2, 6), TypeError, "key_cache is torch.float32"),
        (torch.randn(2, 2, 8), torch.randn(2, 2, 6).half(), TypeError, "value is torch.float16"),
    ],
)
def test_store_refuses(key: torch.Tensor, value: torch.Tensor, error: type[Exception], message: str) -> None:
    given = arguments()
    with pytest.raises(error, match=message):
        store_kv(key, value, given["key_cache"], given["value_cache"], given["batch"])


def test_cpu_works_where_triton_is_absent() -> None:
    program = """
import sys
sys.modules["triton"] = None  # an import of it raises ImportError
import torch
from orca_kernels import RaggedBatch, selective_attention, store_kv
batch = RaggedBatch.build(query_lens=[2], kv_lens=[2], blocks=[[0]], block_size=4, device="cpu")
cache = torch.zeros(4, 1, 8)
store_kv(torch.ones(2, 1, 8), torch.ones(2, 1, 8), cache, cache, batch)
assert selective_attention(torch.ones(2, 1, 8), cache, cache, batch, scaling=1.0).eq(1).all()
"""
    child = subprocess.run(
        [sys.executable, "-c", program], env={"PYTHONPATH": str(KERNELS)}, capture_output=True, text=True
    )
    assert child.returncode == 0, child.stderr


def test_the_query_may_have_any_strides() -> None:
    inputs = make(Case("strided", MIXED), torch.float32)
    query, *rest = inputs.args
    strided = torch.empty(*query.shape, 2)[..., 0].copy_(query)
    assert strided.stride(2) == 2
    expected = selective_attention(query, *rest, **inputs.options)
    torch.testing.assert_close(selective_attention(strided, *rest, **inputs.options), expected)


def test_the_table_has_every_tile() -> None:
    assert set(TILES) == {(d, size, decode) for d in (32, 64, 128, 256) for size in (2, 4) for decode in (False, True)}
    assert choose_tile(80, 64, torch.bfloat16, decode=False) == TILES[128, 2, False]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: choose_tile(512, 64, torch.float16, decode=True), "up to 256, got 512 for K and 64 for V"),
        (lambda: choose_tile(64, 64, torch.float64, decode=True), "float32, bfloat16 and float16, got torch.float64"),
    ],
)
def test_no_tile_for(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("group", [1, 3, 4, 8, 16, 17, 71, 128])
@pytest.mark.parametrize("tile", set(TILES.values()), ids=str)
def test_blocks_cover_every_head_of_a_group(tile: Any, group: int) -> None:
    shape = block_shape(tile, group)
    assert shape.tokens >= 1
    assert shape.tokens * shape.heads <= tile.block_m
    assert shape.heads * shape.head_blocks >= group


@pytest.mark.parametrize(
    ("tiles_per_block", "heads", "max_splits", "expected"),
    [
        ([1000], 8, 64, 32),  # one long decode: its 8 programs leave the device idle
        ([1000] * 100, 8, 64, 1),  # many of them fill it
        ([2] * 400 + [1000], 8, 64, 16),  # one long among many short would run on alone
        ([4], 8, 64, 1),  # too short to cut
        ([1000], 8, 4, 4),  # no memory for more
        ([1000], 8, 0, 1),
    ],
)
def test_long_decodes_are_split_when_the_device_would_idle(
    tiles_per_block: list[int], heads: int, max_splits: int, expected: int
) -> None:
    assert num_kv_splits(tiles_per_block, heads, num_processors=132, max_splits=max_splits) == expected
