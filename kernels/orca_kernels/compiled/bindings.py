"""The compiled library: its functions on tensors."""

from __future__ import annotations

import ctypes
import logging
import os
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor

from ..ragged import RaggedBatch
from .build import CompileError, compile_library

logger = logging.getLogger(__name__)

_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_NORM = (_POINTER, _FLOAT, _FLOAT)
_LINEAR = [_POINTER, _INT, _POINTER, _POINTER, _POINTER, *[_INT] * 4]
_GATED = [_POINTER, _INT, _POINTER, _POINTER, *[_INT] * 5]
_DECODE = [
    *(_POINTER, _INT, _INT),  # query
    *(_POINTER, _INT, _INT),  # keys
    *(_POINTER, _INT, _INT),  # values
    *(_POINTER, _POINTER, _POINTER, _INT),  # which queries
    *(_POINTER, _INT),  # the block table
    _POINTER,  # the result
    *[_INT] * 6,
    *(_FLOAT, _FLOAT, _POINTER, _POINTER, _INT),
]
_SIGNATURES = {
    "orca_packed_size": ([_INT, _INT], _INT),
    "orca_pack_f32": ([_POINTER, _INT, _INT, _POINTER], None),
    "orca_linear_f32": (_LINEAR, None),
    "orca_linear_bf16": (_LINEAR, None),
    "orca_gated_size": ([_INT, _INT], _INT),
    "orca_pack_gated_f32": ([_POINTER, _POINTER, _INT, _INT, _POINTER], None),
    "orca_gated_f32": (_GATED, None),
    "orca_gated_bf16": (_GATED, None),
    "orca_rms_norm_f32": ([_POINTER, _INT, *_NORM, _POINTER, _INT, _INT, _INT], None),
    "orca_attention_inputs_f32": (
        [
            *(_POINTER, _INT, *_NORM),
            *(_POINTER, _POINTER),  # the product
            *(_POINTER, _POINTER, _INT, _POINTER, _POINTER, _FLOAT),  # the rotary embedding
            *(_POINTER, _POINTER),  # scratch, the result
            *[_INT] * 7,
        ],
        None,
    ),
    "orca_layer_outputs_f32": (
        [
            *(_POINTER, _POINTER),
            *(_POINTER, _POINTER, *_NORM, _POINTER, _POINTER, _POINTER),
            *(_POINTER, _POINTER),  # scratch, the result
            *[_INT] * 6,
        ],
        None,
    ),
    "orca_fingerprint": ([_POINTER, _POINTER, _POINTER, _INT, _INT, _INT], None),
    "orca_store": ([*[_POINTER, _INT, _INT] * 4, _POINTER, *[_INT] * 4], None),
    "orca_draw_f32": ([_POINTER, _POINTER, _POINTER, _INT, _INT], _INT),
    "orca_top_p_f32": ([_POINTER, _POINTER, _POINTER, _INT, _INT, _FLOAT, _INT, _FLOAT, _INT], None),
    "orca_decode_f32": (_DECODE, None),
    "orca_decode_bf16": (_DECODE, None),
}

_GENERATOR_BYTES = 5056  # of a CPU generator's state, as draw.cpp reads it

DECODE_DTYPES = frozenset({torch.float32, torch.bfloat16})
LINEAR_DTYPES = DECODE_DTYPES


class RmsNorm(NamedTuple):
    """An RMS norm over the last dimension.

    Attributes:
        weight: (size,) float32, contiguous.
        eps: Added to the mean square.
        offset: Added to the weight.
    """

    weight: Tensor
    eps: float
    offset: float = 0.0

    def pointers(self) -> tuple[int, float, float]:
        """As the kernels take it."""
        return self.weight.data_ptr(), self.offset, self.eps


class PackedProduct(NamedTuple):
    """A linear with a packed weight.

    Attributes:
        packed: As `Library.pack` lays it out.
        bias: (num_out,) float32, contiguous, or None.
        num_in: Inputs.
    """

    packed: Tensor
    bias: Tensor | None
    num_in: int

    def pointers(self) -> tuple[int, int | None]:
        """As the kernels take it."""
        return self.packed.data_ptr(), None if self.bias is None else self.bias.data_ptr()


class Library:
    """The kernels of one shared library, on tensors on the CPU; nothing is checked here.

    Args:
        path: The library, as `compile_library` makes it.

    What says nothing else is in float32; `decode` takes a query and caches of `DECODE_DTYPES`.
    """

    def __init__(self, path: Path) -> None:
        functions = ctypes.CDLL(str(path))  # releases the interpreter's lock during a call
        for name, (arguments, result) in _SIGNATURES.items():
            function = getattr(functions, name)
            function.argtypes, function.restype = arguments, result
        self._gated_size = functions.orca_gated_size
        self._pack_gated = functions.orca_pack_gated_f32
        self._gated = {torch.float32: functions.orca_gated_f32, torch.bfloat16: functions.orca_gated_bf16}
        self._rms_norm = functions.orca_rms_norm_f32
        self._attention_inputs = functions.orca_attention_inputs_f32
        self._layer_outputs = functions.orca_layer_outputs_f32
        self._fingerprint = functions.orca_fingerprint
        self._store = functions.orca_store
        self._draw = functions.orca_draw_f32
        self._top_p = functions.orca_top_p_f32
        self._packed_size = functions.orca_packed_size
        self._pack = functions.orca_pack_f32
        self._linear = {torch.float32: functions.orca_linear_f32, torch.bfloat16: functions.orca_linear_bf16}
        self._decode = {torch.float32: functions.orca_decode_f32, torch.bfloat16: functions.orca_decode_bf16}

    def pack(self, weight: Tensor) -> Tensor:
        """Lay a weight (num_out, num_in), contiguous, out for `linear`; new memory, of about its size."""
        words = _words(weight)
        packed = _empty(self._packed_size(*words.shape))
        self._pack(words.data_ptr(), *words.shape, packed.data_ptr())
        return packed

    def linear(self, rows: Tensor, packed: Tensor, bias: Tensor | None, num_out: int) -> Tensor:
        """`rows` (..., num_in) times a packed weight, plus `bias` (num_out,), contiguous: (..., num_out).

        All in one of `LINEAR_DTYPES`; in bfloat16 sums are in float32, and rounded once.
        """
        flat = _words(_flatten(rows))
        out = _empty(*rows.shape[:-1], num_out, dtype=rows.dtype)
        self._linear[rows.dtype](
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
        gate, up = _words(gate), _words(up)
        packed = _empty(self._gated_size(*gate.shape))
        self._pack_gated(gate.data_ptr(), up.data_ptr(), *gate.shape, packed.data_ptr())
        return packed

    def gated(self, rows: Tensor, packed: Tensor, num_out: int, *, gelu: bool) -> Tensor:
        """`activation(rows @ gate.T) * (rows @ up.T)` of packed weights, (..., num_in) to (..., num_out).

        The activation is SiLU, or with `gelu` GELU by its tanh approximation. All in one of `LINEAR_DTYPES`; in
        bfloat16 each of the two products, the activation and the result are rounded.
        """
        flat = _words(_flatten(rows))
        out = _empty(*rows.shape[:-1], num_out, dtype=rows.dtype)
        self._gated[rows.dtype](
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

    def rms_norm(self, rows: Tensor, norm: RmsNorm) -> Tensor:
        """`rows / rms(rows) * (offset + weight)`, (..., size) to the same."""
        flat = _flatten(rows)
        out = _empty(*rows.shape)
        self._rms_norm(
            flat.data_ptr(),
            flat.stride(0),
            *norm.pointers(),
            out.data_ptr(),
            *flat.shape,
            torch.get_num_threads(),
        )
        return out

    def attention_inputs(
        self,
        rows: Tensor,
        norm: RmsNorm | None,
        packed: Tensor,
        bias: Tensor | None,
        num_heads: tuple[int, int, int],
        cos: Tensor,
        sin: Tensor,
        q_norm: RmsNorm | None = None,
        k_norm: RmsNorm | None = None,
    ) -> Tensor:
        """Queries, keys and values of rows; of the first two, the rotary embedding.

        Args:
            rows: (num_rows, num_in).
            norm: Of the rows, before anything else; None for none.
            packed: The weights of q, k and v, one after the other, as `pack` lays them out.
            bias: (num_out,), contiguous, or None.
            num_heads: Of q, of k, of v; together they have num_out / head_dim.
            cos: (num_rows, head_dim), its last stride 1; a head's halves turn together.
            sin: Likewise, and with the same strides.
            q_norm: Of each query head, before it is turned; its offset is 0.
            k_norm: Likewise of key heads; its epsilon is q_norm's.

        Returns:
            (num_rows, sum(num_heads), head_dim).
        """
        flat = _flatten(rows)
        num_rows, num_in = flat.shape
        head_dim = cos.shape[1]
        out = _empty(num_rows, sum(num_heads), head_dim)
        normed = out if norm is None else _empty(num_rows, num_in)
        self._attention_inputs(
            flat.data_ptr(),
            flat.stride(0),
            *(norm.pointers() if norm is not None else (None, 0.0, 0.0)),
            packed.data_ptr(),
            None if bias is None else bias.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            cos.stride(0),
            None if q_norm is None else q_norm.weight.data_ptr(),
            None if k_norm is None else k_norm.weight.data_ptr(),
            0.0 if q_norm is None else q_norm.eps,
            normed.data_ptr(),
            out.data_ptr(),
            num_rows,
            num_in,
            out.shape[1] * head_dim,
            num_heads[0],
            num_heads[1],
            head_dim,
            torch.get_num_threads(),
        )
        return out

    def layer_outputs(
        self,
        attended: Tensor,
        rows: Tensor,
        output: PackedProduct,
        norm: RmsNorm,
        gate_up: Tensor,
        down: PackedProduct,
        *,
        gelu: bool,
    ) -> Tensor:
        """What a decoder layer makes of its attention's result: `middle + down(gated(norm(middle)))`.

        `middle` is `rows + output(attended)`.

        Args:
            attended: (num_rows, attended_size), contiguous.
            rows: (num_rows, size), contiguous: what the layer got.
            output: The attention's last product, (size, attended_size).
            norm: Of `middle`.
            gate_up: As `pack_gated` lays it out.
            down: (size, inner_size).
            gelu: As for `gated`.

        Returns:
            (num_rows, size).
        """
        num_rows, size = rows.shape
        scratch = _empty(num_rows * (2 * size + down.num_in))
        out = _empty(num_rows, size)
        self._layer_outputs(
            attended.data_ptr(),
            rows.data_ptr(),
            *output.pointers(),
            *norm.pointers(),
            gate_up.data_ptr(),
            *down.pointers(),
            scratch.data_ptr(),
            out.data_ptr(),
            num_rows,
            output.num_in,
            size,
            down.num_in,
            gelu,
            torch.get_num_threads(),
        )
        return out

    def fingerprint(self, rows: Tensor, factors: Tensor) -> Tensor:
        """A number for each row, another one almost surely where any of its bits has changed; at memory's speed.

        Args:
            rows: (num_rows, size) of any dtype, contiguous, at any address; each row a number of words of 32 bits.
            factors: As many int32 as a row has words, positive and random, contiguous.

        Returns:
            (num_rows,) int64: the sums of the words, taken as unsigned, times their factors, modulo 2^64.
        """
        out = _empty(rows.shape[0], dtype=torch.int64)
        self._fingerprint(
            rows.data_ptr(), factors.data_ptr(), out.data_ptr(), len(rows), len(factors), torch.get_num_threads()
        )
        return out

    def store(self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
        """Copy rows of K and V to their `slots` (num_rows,) int64 of the caches.

        Shapes are (num_rows or num_slots, num_heads, size), dtypes one and the same for K and its cache, and for V and
        its; the last stride of all is 1.
        """
        num_rows, num_heads, key_size = key.shape
        key_bytes, value_bytes = key.element_size(), value.element_size()
        self._store(
            *_bytes_apart(key, key_bytes),
            *_bytes_apart(value, value_bytes),
            *_bytes_apart(key_cache, key_bytes),
            *_bytes_apart(value_cache, value_bytes),
            slots.data_ptr(),
            num_rows,
            num_heads,
            key_size * key_bytes,
            value.shape[2] * value_bytes,
        )

    def draw(self, probs: Tensor, generator: torch.Generator) -> Tensor | None:
        """What `torch.multinomial(probs, 1)` draws, number by number, in a tenth of the time.

        Args:
            probs: (num_rows, size) float32, contiguous.
            generator: A CPU generator, which moves on as it would; no other thread may use it meanwhile.

        Returns:
            (num_rows,) int64; None, and the generator stays, where that would raise an error.
        """
        state = generator.get_state()
        tokens = _empty(probs.shape[0], dtype=torch.int64)
        if state.numel() != _GENERATOR_BYTES:
            return None
        if not self._draw(probs.data_ptr(), state.data_ptr(), tokens.data_ptr(), *probs.shape):
            return None
        generator.set_state(state)
        return tokens

    def top_p(
        self, scores: Tensor, top_p: float, *, min_tokens_to_keep: int, filter_value: float
    ) -> tuple[Tensor, Tensor]:
        """What transformers' `TopPLogitsWarper` makes of scores, of most rows, in a twentieth of the time.

        Args:
            scores: (num_rows, size) float32, contiguous.
            top_p: Share of those that stay.
            min_tokens_to_keep: Stay whatever their share is.
            filter_value: In the place of those that go.

        Returns:
            (num_rows, size) and, of (num_rows,) bool, which rows it has: not those in which a rounding would decide.
        """
        out = _empty(*scores.shape)
        is_done = _empty(len(scores), dtype=torch.bool)
        self._top_p(
            scores.data_ptr(),
            out.data_ptr(),
            is_done.data_ptr(),
            *scores.shape,
            1 - top_p,
            min_tokens_to_keep,
            filter_value,
            torch.get_num_threads(),
        )
        return out, is_done

    def decode(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        batch: RaggedBatch,
        queries: Tensor,
        out: Tensor,
        *,
        scaling: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
    ) -> None:
        """Attention of some queries of the batch, one by one.

        `queries` (3, num) int32, contiguous, has the row of each, its request, and the number of keys that it sees.
        Other rows of `out` (total_q, num_heads, v_head_dim), contiguous, are left alone. The other arguments are those
        of `orca_kernels.selective_attention`; `sinks` and `alibi_slopes` are in float32.
        """
        rows, num_queries = queries.data_ptr(), queries.shape[1]
        self._decode[query.dtype](
            query.data_ptr(),
            *query.stride()[:2],
            key_cache.data_ptr(),
            *key_cache.stride()[:2],
            value_cache.data_ptr(),
            *value_cache.stride()[:2],
            rows,
            rows + 4 * num_queries,
            rows + 8 * num_queries,
            num_queries,
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


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Memory for a result: on the CPU, and of that dtype, whatever the user's defaults are."""
    return torch.empty(shape, dtype=dtype, device="cpu")


def _bytes_apart(rows: Tensor, element_size: int) -> tuple[int, int, int]:
    """Address, and bytes from row to row and from head to head."""
    row, head, _ = rows.stride()
    return rows.data_ptr(), row * element_size, head * element_size


def can_read(weight: Tensor) -> bool:
    """Whether `Library.pack` takes a weight (num_out, num_in), contiguous, on the CPU: in bfloat16 it reads pairs."""
    return weight.dtype is torch.float32 or (weight.dtype is torch.bfloat16 and weight.shape[1] % 2 == 0)


def _words(rows: Tensor) -> Tensor:
    """`rows` (num_rows, size), its last stride 1, as words of 32 bits: float32 as it is, bfloat16 in pairs.

    They are copied where they do not lie on words: a view may begin anywhere in a storage, and a storage anywhere.
    """
    is_paired = rows.dtype is not torch.float32
    if rows.data_ptr() % 4 or (is_paired and (rows.stride(0) % 2 or rows.storage_offset() % 2)):
        rows = rows.clone(memory_format=torch.contiguous_format)
    return rows.view(torch.float32) if is_paired else rows


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
