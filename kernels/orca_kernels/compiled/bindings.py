"""The compiled library: its functions on tensors."""

from __future__ import annotations

import ctypes
import logging
import os
from functools import lru_cache
from pathlib import Path
from threading import Lock

import torch
from torch import Tensor

from ..ragged import RaggedBatch
from .build import CompileError, compile_library

logger = logging.getLogger(__name__)

_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_DECODE = [
    *(_POINTER, _INT, _INT),  # query
    *(_POINTER, _INT, _INT),  # keys
    *(_POINTER, _INT, _INT),  # values
    *(_POINTER, _INT, _POINTER, _POINTER, _POINTER, _INT),  # the batch
    _POINTER,  # the result
    *[_INT] * 6,
    *(_FLOAT, _FLOAT, _POINTER, _POINTER, _INT),
]
_SIGNATURES = {
    "orca_packed_size": ([_INT, _INT], _INT),
    "orca_pack_f32": ([_POINTER, _INT, _INT, _POINTER], None),
    "orca_linear_f32": ([_POINTER, _INT, _POINTER, _POINTER, _POINTER, _INT, _INT, _INT, _INT], None),
    "orca_gated_size": ([_INT, _INT], _INT),
    "orca_pack_gated_f32": ([_POINTER, _POINTER, _INT, _INT, _POINTER], None),
    "orca_gated_f32": ([_POINTER, _INT, _POINTER, _POINTER, _INT, _INT, _INT, _INT, _INT], None),
    "orca_rms_norm_f32": ([_POINTER, _INT, _POINTER, _FLOAT, _FLOAT, _POINTER, _INT, _INT, _INT], None),
    "orca_rotate_f32": (
        [_POINTER, *[_INT] * 5, _POINTER, _POINTER, _INT, _POINTER, _POINTER, _FLOAT, _INT],
        None,
    ),
    "orca_decode_f32": (_DECODE, None),
    "orca_decode_bf16": (_DECODE, None),
}

DECODE_DTYPES = frozenset({torch.float32, torch.bfloat16})


class Library:
    """The kernels of one shared library, on tensors on the CPU; nothing is checked here.

    Args:
        path: The library, as `compile_library` makes it.

    Linears are in float32; `decode` takes a query and caches of `DECODE_DTYPES`.
    """

    def __init__(self, path: Path) -> None:
        functions = ctypes.CDLL(str(path))  # releases the interpreter's lock during a call
        for name, (arguments, result) in _SIGNATURES.items():
            function = getattr(functions, name)
            function.argtypes, function.restype = arguments, result
        self._gated_size = functions.orca_gated_size
        self._pack_gated = functions.orca_pack_gated_f32
        self._gated = functions.orca_gated_f32
        self._rms_norm = functions.orca_rms_norm_f32
        self._rotate = functions.orca_rotate_f32
        self._packed_size = functions.orca_packed_size
        self._pack = functions.orca_pack_f32
        self._linear = functions.orca_linear_f32
        self._decode = {torch.float32: functions.orca_decode_f32, torch.bfloat16: functions.orca_decode_bf16}

    def pack(self, weight: Tensor) -> Tensor:
        """Lay a weight (num_out, num_in), contiguous, out for `linear`; new memory, of about its size."""
        packed = torch.empty(self._packed_size(*weight.shape))
        self._pack(weight.data_ptr(), *weight.shape, packed.data_ptr())
        return packed

    def linear(self, rows: Tensor, packed: Tensor, bias: Tensor | None, num_out: int) -> Tensor:
        """`rows` (..., num_in) times a packed weight, plus `bias` (num_out,), contiguous: (..., num_out)."""
        flat = _flatten(rows)
        out = torch.empty(*rows.shape[:-1], num_out)
        self._linear(
            flat.data_ptr(),
            flat.stride(0),
            packed.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            flat.shape[0],
            num_out,
            flat.shape[1],
            torch.get_num_threads(),
        )
        return out

    def pack_gated(self, gate: Tensor, up: Tensor) -> Tensor:
        """Lay two weights (num_out, num_in), contiguous, out for `gated`; new memory, of about their size."""
        packed = torch.empty(self._gated_size(*gate.shape))
        self._pack_gated(gate.data_ptr(), up.data_ptr(), *gate.shape, packed.data_ptr())
        return packed

    def gated(self, rows: Tensor, packed: Tensor, num_out: int, *, gelu: bool) -> Tensor:
        """`activation(rows @ gate.T) * (rows @ up.T)` of packed weights, (..., num_in) to (..., num_out).

        The activation is SiLU, or with `gelu` GELU by its tanh approximation.
        """
        flat = _flatten(rows)
        out = torch.empty(*rows.shape[:-1], num_out)
        self._gated(
            flat.data_ptr(),
            flat.stride(0),
            packed.data_ptr(),
            out.data_ptr(),
            flat.shape[0],
            num_out,
            flat.shape[1],
            gelu,
            torch.get_num_threads(),
        )
        return out

    def rms_norm(self, rows: Tensor, weight: Tensor, *, offset: float, eps: float) -> Tensor:
        """`rows / rms(rows) * (offset + weight)`, (..., size) with a weight (size,), contiguous."""
        flat = _flatten(rows)
        out = torch.empty(rows.shape)
        self._rms_norm(
            flat.data_ptr(),
            flat.stride(0),
            weight.data_ptr(),
            offset,
            eps,
            out.data_ptr(),
            *flat.shape,
            torch.get_num_threads(),
        )
        return out

    def rotate(
        self,
        rows: Tensor,
        num_q_heads: int,
        num_k_heads: int,
        cos: Tensor,
        sin: Tensor,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        *,
        eps: float = 0.0,
    ) -> None:
        """Rotary embedding in place, of the query heads and then the key heads that each row begins with.

        Args:
            rows: (num_rows, at least (num_q_heads + num_k_heads) * head_dim), its last stride 1.
            num_q_heads: Query heads.
            num_k_heads: Key heads.
            cos: (num_rows, head_dim), its last stride 1; a head's halves turn together.
            sin: Likewise, and with the same strides.
            q_norm: (head_dim,) or None: weight of an RMS norm over each query head, before it is turned.
            k_norm: Likewise for key heads.
            eps: Of the norms.
        """
        self._rotate(
            rows.data_ptr(),
            rows.stride(0),
            rows.shape[0],
            num_q_heads,
            num_k_heads,
            cos.shape[1],
            cos.data_ptr(),
            sin.data_ptr(),
            cos.stride(0),
            None if q_norm is None else q_norm.data_ptr(),
            None if k_norm is None else k_norm.data_ptr(),
            eps,
            torch.get_num_threads(),
        )

    def decode(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        batch: RaggedBatch,
        requests: Tensor,
        out: Tensor,
        *,
        scaling: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
    ) -> None:
        """Attention of those `requests` (num,) int32 of the batch that have one query each.

        The others' rows of `out` (total_q, num_heads, v_head_dim), contiguous, are left alone. The other arguments are
        those of `orca_kernels.selective_attention`; `sinks` and `alibi_slopes` are in float32.
        """
        self._decode[query.dtype](
            query.data_ptr(),
            *query.stride()[:2],
            key_cache.data_ptr(),
            *key_cache.stride()[:2],
            value_cache.data_ptr(),
            *value_cache.stride()[:2],
            requests.data_ptr(),
            len(requests),
            batch.cu_seqlens_q.data_ptr(),
            batch.kv_lens.data_ptr(),
            batch.block_table.data_ptr(),
            batch.block_table.stride(0),
            out.data_ptr(),
            query.shape[1],
            key_cache.shape[1],
            query.shape[2],
            value_cache.shape[2],
            batch.block_size,
            sliding_window or 0,
            scaling,
            softcap or 0.0,
            None if sinks is None else sinks.data_ptr(),
            None if alibi_slopes is None else alibi_slopes.data_ptr(),
            torch.get_num_threads(),
        )


def _flatten(rows: Tensor) -> Tensor:
    """`rows` (..., size) as (num_rows, size) whose last stride is 1; rows may lie apart."""
    flat = rows.reshape(-1, rows.shape[-1])
    return flat if flat.stride(1) == 1 else flat.contiguous()


_loading = Lock()


def library() -> Library | None:
    """The kernels, compiled if need be (some seconds, once on a machine); None where they cannot be had.

    `ORCA_HF_COMPILE=0` in the environment does without them.
    """
    with _loading:
        return _load()


def loaded() -> Library | None:
    """The kernels if `library` has been called, at no cost; else None."""
    return _load() if _load.cache_info().currsize else None


@lru_cache(maxsize=1)
def _load() -> Library | None:
    if os.environ.get("ORCA_HF_COMPILE") == "0":
        return None
    if not _shares_threads():
        logger.info("CPU kernels are not compiled: PyTorch does not run on GNU OpenMP here.")
        return None
    try:
        return Library(compile_library())
    except (CompileError, OSError) as error:
        logger.info("CPU kernels cannot be compiled, PyTorch's are used: %s", error)
        return None


def _shares_threads() -> bool:
    """Whether PyTorch runs on GNU OpenMP, as the kernels will: two runtimes would fight for the cores."""
    try:
        mapped = Path("/proc/self/maps").read_text()
    except OSError:
        return False
    return "libgomp" in mapped and "libiomp" not in mapped and "libomp" not in mapped
