"""Compiles the kernels without a GPU and reports what they cost: `python -m orca_kernels.compile_report`."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from .tile_cost import Cost, attention_cost
from .tiles import Tile, block_shape, choose_tile, next_power_of_two
from .triton_attention import attention_kernel, merge_kernel
from .triton_store import store_kernel

TARGETS: dict[str, GPUTarget] = {
    "sm80": GPUTarget("cuda", 80, 32),
    "sm90": GPUTarget("cuda", 90, 32),
    "sm100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
_TYPE_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
# Features of the attention kernel that are flags, and the selections of them that a report compiles. With a window one
# of the kernel's two loops is gone, so the last is not more than the others in everything.
_FEATURES = ("HAS_WINDOW", "HAS_SOFTCAP", "HAS_SINKS", "HAS_ALIBI", "SPLIT")
VARIANTS: dict[str, tuple[str, ...]] = {"plain": (), "split": ("SPLIT",), "all": _FEATURES}
HEAD_DIMS = (32, 64, 128, 256)  # the tiles' widths; others are padded to these
_GROUP, _NUM_KV_HEADS = 4, 8
# What the costs are counted for: (rows, kv_len), by whether it is a decode.
_COUNTED = {True: (1, 4096), False: (512, 512)}


@dataclass(frozen=True, slots=True)
class Resources:
    """What one compiled kernel takes.

    Attributes:
        kernel: Name of the kernel and its case.
        target: Key of `TARGETS`.
        registers: Per thread.
        spill_bytes: Stack and local memory per thread (CUDA), or scratch (AMD): 0 when nothing spills.
        shared_bytes: Shared memory per program.
        cost: Of the attention kernel: what its tile moves and does, for 4096 keys and one row of a decode, or 512 keys
            and as many rows of a prefill, with 32 heads of which 4 share K and V.
    """

    kernel: str
    target: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    cost: Cost | None = None


def attention_resources(
    target: str, head_dim: int, dtype: torch.dtype, *, decode: bool, variant: str = "plain", tile: Tile | None = None
) -> Resources:
    """Compiles the attention kernel of one tile for one target.

    Args:
        target: Key of `TARGETS`.
        head_dim: Of K and V.
        dtype: Of query and caches.
        decode: The tile for decodes, or the one for prefills.
        variant: Key of `VARIANTS`.
        tile: Instead of the table's.
    """
    amd = TARGETS[target].backend == "hip"
    tile = tile or choose_tile(head_dim, head_dim, dtype, decode=decode, amd=amd)
    shape = block_shape(tile, _GROUP)
    name = _TYPE_NAMES[dtype]
    flags = dict.fromkeys(_FEATURES, False) | dict.fromkeys(VARIANTS[variant], True)
    constants: dict[str, Any] = {
        "NUM_KV_HEADS": _NUM_KV_HEADS,
        "GROUP": _GROUP,
        "HEADS_PER_BLOCK": shape.heads,
        "BLOCK_TOKENS": shape.tokens,
        "HEAD_DIM": head_dim,
        "V_HEAD_DIM": head_dim,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_D": next_power_of_two(head_dim),
        "BLOCK_DV": next_power_of_two(head_dim),
        "BLOCK_SIZE": 16,
        "SINGLE_BLOCK": decode,
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        **flags,
    }
    pointers = {
        "query_ptr": name,
        "key_cache_ptr": name,
        "value_cache_ptr": name,
        "out_ptr": "fp32" if flags["SPLIT"] else name,
        "cu_seqlens_q_ptr": "i32",
        "kv_lens_ptr": "i32",
        "block_table_ptr": "i32",
    }
    for pointer, kind, flag in (
        ("lse_ptr", "fp32", "SPLIT"),
        ("sinks_ptr", name, "HAS_SINKS"),
        ("slopes_ptr", "fp32", "HAS_ALIBI"),
    ):
        if flags[flag]:
            pointers[pointer] = kind
        else:
            constants[pointer] = None
    case = f"attention {'decode' if decode else 'prefill'} {variant} {name} d{head_dim}"
    resources = _compile(attention_kernel, case, target, pointers, constants, tile.num_warps, tile.num_stages)
    rows, kv_len = _COUNTED[decode]
    cost = attention_cost(
        tile,
        rows=rows,
        kv_len=kv_len,
        num_heads=_NUM_KV_HEADS * _GROUP,
        num_kv_heads=_NUM_KV_HEADS,
        head_dim=head_dim,
        dtype=dtype,
    )
    return replace(resources, cost=cost)


def merge_resources(target: str, head_dim: int, dtype: torch.dtype, num_splits: int = 64) -> Resources:
    """Compiles the merge of split K/V."""
    name = _TYPE_NAMES[dtype]
    pointers = {"partial_ptr": "fp32", "lse_ptr": "fp32", "out_ptr": name}
    constants = {"NUM_SPLITS": num_splits, "V_HEAD_DIM": head_dim, "BLOCK_DV": next_power_of_two(head_dim)}
    return _compile(merge_kernel, f"merge {num_splits} {name} d{head_dim}", target, pointers, constants)


def store_resources(target: str, head_dim: int, dtype: torch.dtype, num_kv_heads: int = _NUM_KV_HEADS) -> Resources:
    """Compiles `store_kv`."""
    name = _TYPE_NAMES[dtype]
    caches = dict.fromkeys(("key_ptr", "value_ptr", "key_cache_ptr", "value_cache_ptr"), name)
    constants = {
        "HEAD_DIM": head_dim,
        "V_HEAD_DIM": head_dim,
        "BLOCK_H": num_kv_heads,
        "BLOCK_D": next_power_of_two(head_dim),
        "stride_key_dim": 1,
        "stride_value_dim": 1,
    }
    pointers = {**caches, "slot_mapping_ptr": "i64"}
    return _compile(store_kernel, f"store {name} d{head_dim}", target, pointers, constants)


def _compile(
    kernel: Any,
    case: str,
    target: str,
    pointers: dict[str, str],
    constants: dict[str, Any],
    num_warps: int = 4,
    num_stages: int = 3,
) -> Resources:
    signature: dict[str, str] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in pointers:
            signature[name] = f"*{pointers[name]}"
        else:
            signature[name] = "fp32" if name in ("scaling", "softcap") else "i32"
        # What the launcher finds on ordinary tensors: aligned pointers, strides in multiples of 16.
        if name in pointers or (name.startswith("stride_") and name not in constants and name != "stride_table"):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True}
    compiled = triton.compile(source, target=TARGETS[target], options=options)
    shared: int = compiled.metadata.shared
    if TARGETS[target].backend == "cuda":
        registers, spilled = _cuda_usage(compiled.asm["cubin"])
    else:
        registers, spilled = _amd_usage(compiled.asm["amdgcn"])
    return Resources(case, target, registers, spilled, shared)


def _cuda_usage(cubin: bytes) -> tuple[int, int]:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return _number(r"REG:(\d+)", text), _number(r"STACK:(\d+)", text) + _number(r"LOCAL:(\d+)", text)


def _amd_usage(assembly: str) -> tuple[int, int]:
    # A spilled scalar register lies in a vector register and takes no memory; only scratch is memory.
    spilled = _number(r"\.private_segment_fixed_size:\s*(\d+)", assembly) + 4 * _number(
        r"\.vgpr_spill_count:\s*(\d+)", assembly
    )
    return _number(r"\.vgpr_count:\s*(\d+)", assembly), spilled


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise RuntimeError(f"The compiler's report has no {pattern!r}; its format must have changed:\n{text[:2000]}")
    return int(found.group(1))


def report(targets: Iterable[str] = tuple(TARGETS), head_dims: Iterable[int] = HEAD_DIMS) -> Iterator[Resources]:
    """Compiles every kernel for the targets, one result at a time."""
    for target in targets:
        for head_dim in head_dims:
            for dtype in _TYPE_NAMES:
                for decode in (False, True):
                    for variant in VARIANTS:
                        yield attention_resources(target, head_dim, dtype, decode=decode, variant=variant)
                yield merge_resources(target, head_dim, dtype)
                yield store_resources(target, head_dim, dtype)


def main() -> None:
    """Prints the report as a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", nargs="*", choices=list(TARGETS), default=list(TARGETS))
    parser.add_argument("--head-dim", nargs="*", type=int, default=list(HEAD_DIMS))
    options = parser.parse_args()
    write = sys.stdout.write
    write(f"{'kernel':<34} {'target':<7} {'registers':>9} {'spill B':>8} {'shared B':>9}")
    write(f" {'KB moved':>9} {'MFLOP':>8} {'FLOP/B':>7} {'B in flight':>12}\n")
    for line in report(options.target, options.head_dim):
        write(f"{line.kernel:<34} {line.target:<7} {line.registers:>9} {line.spill_bytes:>8} {line.shared_bytes:>9}")
        if (cost := line.cost) is not None:
            write(f" {cost.bytes_moved / 1e3:>9.0f} {cost.operations / 1e6:>8.1f} {cost.intensity:>7.1f}")
            write(f" {cost.bytes_in_flight:>12}")
        write("\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
