"""Every tile compiles for the GPUs that it is meant for, and spills no register. Needs no GPU."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET", "0") == "1":
    pytest.skip("an interpreted kernel cannot be compiled", allow_module_level=True)

from orca_kernels.compile_report import (
    TARGETS,
    Resources,
    attention_resources,
    merge_resources,
    store_resources,
)
from orca_kernels.tiles import AMD_TILES, TILES

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
# An RTX card has 99 KiB, an MI300 64 KiB.
SHARED_LIMITS = {"sm80": 99 << 10, "sm90": 227 << 10, "sm100": 227 << 10, "gfx942": 64 << 10}
# float16 and bfloat16 have the same tiles: between them they are compiled without and with all features. Split is plain
# and some more.
COMPILED = {2: [(FP16, "split"), (BF16, "all")], 4: [(FP32, "split"), (FP32, "all")]}


def check(resources: Resources) -> None:
    assert resources.registers > 0
    assert resources.spill_bytes == 0, resources
    assert resources.shared_bytes <= SHARED_LIMITS[resources.target], resources


@pytest.mark.parametrize(("head_dim", "itemsize", "decode"), TILES, ids=str)
@pytest.mark.parametrize("target", TARGETS)
def test_no_tile_of_the_table_spills(target: str, head_dim: int, itemsize: int, decode: bool) -> None:
    for dtype, variant in COMPILED[itemsize]:
        check(attention_resources(target, head_dim, dtype, decode=decode, variant=variant))


def test_the_other_table_holds_exceptions_only() -> None:
    assert AMD_TILES.keys() < TILES.keys()
    assert all(AMD_TILES[key] != TILES[key] for key in AMD_TILES)


PADDED = [(80, FP16, False), (80, FP16, True), (192, FP16, False), (192, FP16, True), (96, FP32, True)]
# 16 bytes a thread on sm80; the next smaller tile spills too.
SPILLS = pytest.param(96, FP32, False, marks=pytest.mark.xfail(strict=True, raises=AssertionError))


@pytest.mark.parametrize(("head_dim", "dtype", "decode"), [*PADDED, SPILLS], ids=str)
def test_a_padded_head_does_not_spill(head_dim: int, dtype: torch.dtype, decode: bool) -> None:
    check(attention_resources("sm80", head_dim, dtype, decode=decode))


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("head_dim", [32, 256])
@pytest.mark.parametrize("target", TARGETS)
def test_merge_and_store_do_not_spill(target: str, head_dim: int, dtype: torch.dtype) -> None:
    for num_splits in (2, 64):
        check(merge_resources(target, head_dim, dtype, num_splits))
    check(store_resources(target, head_dim, dtype))
