"""Every tile compiles for the GPUs that it is meant for, and spills no register. Needs no GPU."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET", "0") == "1":
    pytest.skip("an interpreted kernel cannot be compiled", allow_module_level=True)

from orca_kernels.compile_report import (
    Resources,
    attention_resources,
    merge_resources,
    store_resources,
)

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
# An RTX card has 99 KiB, an MI300 64 KiB.
SHARED_LIMITS = {"sm80": 99 << 10, "sm90": 227 << 10, "sm100": 227 << 10, "gfx942": 64 << 10}
HEADS_AND_DTYPES = [(d, dtype) for d in (64, 128, 256) for dtype in (FP16, BF16, FP32)] + [(32, FP16), (32, FP32)]


def check(resources: Resources) -> None:
    assert resources.registers > 0
    assert resources.spill_bytes == 0, resources
    assert resources.shared_bytes <= SHARED_LIMITS[resources.target], resources


@pytest.mark.parametrize("decode", [False, True], ids=["prefill", "decode"])
@pytest.mark.parametrize(("head_dim", "dtype"), HEADS_AND_DTYPES, ids=str)
def test_no_tile_spills_on_sm80(head_dim: int, dtype: torch.dtype, decode: bool) -> None:
    # float16 and bfloat16 have the same tiles: between them they are compiled plain and with all features.
    check(attention_resources("sm80", head_dim, dtype, decode=decode, features=dtype != FP16))


@pytest.mark.parametrize(
    ("head_dim", "dtype", "decode"), [(128, BF16, False), (128, FP16, True), (256, BF16, False)], ids=str
)
@pytest.mark.parametrize("target", ["sm90", "sm100", "gfx942"])
def test_tiles_do_not_spill_elsewhere(target: str, head_dim: int, dtype: torch.dtype, decode: bool) -> None:
    check(attention_resources(target, head_dim, dtype, decode=decode, features=head_dim == 256))


@pytest.mark.parametrize("decode", [False, True], ids=["prefill", "decode"])
def test_a_padded_head_does_not_spill(decode: bool) -> None:
    check(attention_resources("sm80", 80, FP16, decode=decode))


@pytest.mark.parametrize("target", ["sm80", "gfx942"])
def test_merge_and_store_do_not_spill(target: str) -> None:
    check(merge_resources(target, 256, BF16))
    check(store_resources(target, 128, BF16))
