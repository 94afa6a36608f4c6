"""Promise: what a tile is said to move and do is what a walk over its programs, tiles and elements counts."""

from __future__ import annotations

import pytest
import torch

from orca_kernels.tile_cost import attention_cost
from orca_kernels.tiles import TILES, Tile, block_shape

SHAPES = [
    # rows, kv_len, num_heads, num_kv_heads, head_dim, num_splits
    (1, 1, 1, 1, 32, 1),
    (1, 100, 8, 2, 64, 1),
    (1, 300, 9, 3, 80, 4),
    (37, 37, 4, 4, 64, 1),
    (20, 90, 6, 2, 128, 1),
    (5, 40, 71, 1, 32, 2),
]
COUNTED_TILES = [Tile(16, 32, 4, 2), Tile(64, 32, 4, 1), Tile(128, 64, 8, 3)]


@pytest.mark.parametrize("tile", COUNTED_TILES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_cost_is_a_plain_count(shape: tuple[int, ...], tile: Tile) -> None:
    rows, kv_len, num_heads, num_kv_heads, head_dim, num_splits = shape
    group = num_heads // num_kv_heads
    padded = 1 << (head_dim - 1).bit_length()
    heads_at_once = block_shape(tile, group).heads
    tokens_at_once = tile.block_m // heads_at_once
    loaded = stored = multiplied = 0
    for _kv_head in range(num_kv_heads):
        for head in range(0, group, heads_at_once):
            for token in range(0, rows, tokens_at_once):
                own = [
                    (t, h)
                    for t in range(token, min(token + tokens_at_once, rows))
                    for h in range(head, min(head + heads_at_once, group))
                ]
                loaded += len(own) * head_dim
                stored += len(own) * head_dim
                last_position = max(kv_len - rows + t for t, _ in own)
                for start in range(0, last_position + 1, tile.block_n):
                    loaded += 2 * head_dim * sum(key <= last_position for key in range(start, start + tile.block_n))
                    multiplied += 2 * tile.block_m * tile.block_n * padded
    partial = 0 if num_splits == 1 else rows * num_heads * num_splits * (head_dim + 1)
    cost = attention_cost(
        tile,
        rows=rows,
        kv_len=kv_len,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=torch.float16,
        num_splits=num_splits,
    )
    assert cost.bytes_moved == 2 * (loaded + stored) + 2 * 4 * partial
    assert cost.operations == 2 * multiplied
    assert cost.intensity == cost.operations / cost.bytes_moved


def test_a_decode_moves_the_same_by_any_tile_and_a_prefill_less_by_more_rows() -> None:
    heads = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": torch.float16}
    decodes = {attention_cost(tile, rows=1, kv_len=4096, **heads).bytes_moved for tile in COUNTED_TILES}
    assert len(decodes) == 1
    moved = [attention_cost(tile, rows=512, kv_len=512, **heads).bytes_moved for tile in COUNTED_TILES]
    assert moved[0] > moved[1] > moved[2]


@pytest.mark.parametrize(("head_dim", "itemsize"), [(d, i) for d, i, decode in TILES if decode], ids=str)
def test_decodes_have_enough_in_flight_to_keep_a_memory_busy(head_dim: int, itemsize: int) -> None:
    dtype = {2: torch.float16, 4: torch.float32}[itemsize]
    cost = attention_cost(
        TILES[head_dim, itemsize, True],
        rows=1,
        kv_len=4096,
        num_heads=8,
        num_kv_heads=2,
        head_dim=head_dim,
        dtype=dtype,
    )
    assert cost.bytes_in_flight >= 8 << 10  # of each of a multiprocessor's programs, of which there are two or more
