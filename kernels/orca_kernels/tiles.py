"""The tiles of the attention kernel: one table, no tuning at run time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Tile:
    """Sizes of one program of the attention kernel.

    Attributes:
        block_m: Query rows (tokens x heads of a group).
        block_n: Keys per step.
        num_warps: Warps of the program.
        num_stages: Depth of the pipeline of K/V loads.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# (padded head_dim, bytes of an element, decode) -> tile. `python -m orca_kernels.compile_report` shows what each takes
# of a device, and `tile_cost` what it moves and does for it.
# A prefill's K/V are loaded once for block_m rows, so its operations for each byte grow with block_m: each has the most
# rows that spill no register on any target. Head dim 128 in 2 bytes stays at 64: 128 rows spill on sm80 with 64 keys,
# on sm100 with 32. A decode loads K/V once whatever the tile, and pads its rows to 16 whatever the tile; what counts is
# how much it has in flight, so each has the most keys that spill nothing, up to 32 KB.
# That is so in the variants and widths that the report compiles. Other selections of features spill up to 32 bytes a
# thread, mostly a window in split prefills and fp32; fp32 prefills at head dim 96, padded to 128, 24 on sm80.
TILES: dict[tuple[int, int, bool], Tile] = {
    (32, 2, False): Tile(128, 32, 8, 2),
    (32, 2, True): Tile(16, 128, 4, 2),
    (64, 2, False): Tile(128, 32, 8, 2),
    (64, 2, True): Tile(16, 128, 4, 2),
    (128, 2, False): Tile(64, 32, 4, 2),
    (128, 2, True): Tile(16, 64, 4, 2),
    (256, 2, False): Tile(64, 32, 8, 2),
    (256, 2, True): Tile(16, 32, 8, 2),
    (32, 4, False): Tile(64, 32, 8, 2),
    (32, 4, True): Tile(16, 64, 4, 2),
    (64, 4, False): Tile(64, 32, 8, 2),
    (64, 4, True): Tile(16, 16, 4, 2),
    (128, 4, False): Tile(32, 32, 8, 1),
    (128, 4, True): Tile(16, 32, 4, 1),
    (256, 4, False): Tile(32, 16, 8, 1),
    (256, 4, True): Tile(16, 16, 8, 1),
}
# Where AMD's compiler wants another.
AMD_TILES: dict[tuple[int, int, bool], Tile] = {(256, 2, False): Tile(64, 32, 8, 1)}
MAX_HEAD_DIM = 256
# Up to so many rows (tokens x heads of a group) per request, the decode tile is used.
DECODE_ROWS = 16
# Programs that one multiprocessor runs at a time, about.
_PROGRAMS_PER_PROCESSOR = 2
# Fewer K/V tiles than this do not pay for the merge.
_MIN_TILES_PER_SPLIT = 4


def next_power_of_two(number: int) -> int:
    """Returns the smallest power of two that is not below `number`, at least 1."""
    return 1 << (number - 1).bit_length()


def choose_tile(head_dim: int, v_head_dim: int, dtype: torch.dtype, *, decode: bool, amd: bool = False) -> Tile:
    """Returns the tile for K of width `head_dim` and V of width `v_head_dim`.

    Args:
        head_dim: Of query and K.
        v_head_dim: Of V.
        dtype: Of query and caches.
        decode: A request has `DECODE_ROWS` query rows at most.
        amd: The device is AMD's.

    Raises:
        ValueError: The head is wider than the kernel takes, or the dtype has no tile.
    """
    width = max(32, next_power_of_two(max(head_dim, v_head_dim)))
    if width > MAX_HEAD_DIM:
        raise ValueError(
            f"The Triton kernel takes head_dim up to {MAX_HEAD_DIM}, got {head_dim} for K and {v_head_dim} for V; "
            "use backend='reference'."
        )
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"The Triton kernel takes float32, bfloat16 and float16, got {dtype}.")
    key = (width, dtype.itemsize, decode)
    return AMD_TILES.get(key, TILES[key]) if amd else TILES[key]


@dataclass(frozen=True, slots=True)
class BlockShape:
    """How a tile's rows are dealt to tokens and heads.

    Attributes:
        tokens: Tokens of a query block.
        heads: Heads of a group in a query block; fewer than the group where the group has more than the tile's rows.
        head_blocks: Query blocks over a group.
    """

    tokens: int
    heads: int
    head_blocks: int


def block_shape(tile: Tile, group: int) -> BlockShape:
    """Returns how a tile serves groups of `group` heads."""
    head_blocks = -(-group // tile.block_m)
    heads = -(-group // head_blocks)
    return BlockShape(tokens=tile.block_m // heads, heads=heads, head_blocks=head_blocks)


def num_kv_splits(
    tiles_per_block: Sequence[int], programs_per_block: int, num_processors: int, max_splits: int = 64
) -> int:
    """Returns in how many parts each request's K/V is read, a power of two.

    A device is busy when its longest program takes no longer than an even share of all the work. One long decode among
    few programs (or among many short ones) is cut until its parts are near that share, or too small to be worth it.

    Args:
        tiles_per_block: K/V tiles that each query block reads.
        programs_per_block: Programs per query block (K/V heads).
        num_processors: Multiprocessors of the device.
        max_splits: Upper bound, from the memory for partial results.
    """
    share = sum(tiles_per_block) * programs_per_block / (_PROGRAMS_PER_PROCESSOR * num_processors)
    longest = max(tiles_per_block)
    splits = 1
    while splits * 2 <= max_splits and longest / (splits * 2) >= max(share, _MIN_TILES_PER_SPLIT):
        splits *= 2
    return splits
