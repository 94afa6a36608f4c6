"""What a tile costs, counted: bytes that its programs move and operations that they do. No device is asked."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .tiles import Tile, block_shape, next_power_of_two


@dataclass(frozen=True, slots=True)
class Cost:
    """The work of one launch.

    Attributes:
        bytes_moved: Q, K and V as often as a program loads them, the output, and partial results where K/V are split.
            What a program loads again may come from the device's cache.
        operations: Multiplications and additions of both products, on whole tiles: padding and hidden keys included.
        bytes_in_flight: K and V that one program has asked for ahead of their use. Its multiprocessor must have about
            10 to 20 KB of them to keep the memory busy: bandwidth x latency / multiprocessors.
    """

    bytes_moved: int
    operations: int
    bytes_in_flight: int

    @property
    def intensity(self) -> float:
        """Operations for each byte. Below a device's own ratio (A100: 150, H100: 300) its memory is the limit."""
        return self.operations / self.bytes_moved


def attention_cost(
    tile: Tile,
    *,
    rows: int,
    kv_len: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    num_splits: int = 1,
) -> Cost:
    """Counts the attention of one request's last `rows` tokens over its `kv_len`, in fp32 partial results if split."""
    group = num_heads // num_kv_heads
    shape = block_shape(tile, group)
    keys = tiles = 0
    for first in range(0, rows, shape.tokens):
        visible = kv_len - rows + min(first + shape.tokens, rows)
        keys += visible
        tiles += -(-visible // tile.block_n)
    programs = num_kv_heads * shape.head_blocks
    results = rows * num_heads * head_dim
    moved = 2 * results * dtype.itemsize + programs * keys * 2 * head_dim * dtype.itemsize
    if num_splits > 1:
        moved += 2 * 4 * num_splits * (results + rows * num_heads)
    step = tile.block_n * 2 * head_dim * dtype.itemsize
    return Cost(
        bytes_moved=moved,
        # Two products, a multiplication and an addition for each element that they meet.
        operations=programs * tiles * 4 * tile.block_m * tile.block_n * max(16, next_power_of_two(head_dim)),
        bytes_in_flight=step * max(1, tile.num_stages - 1),
    )
