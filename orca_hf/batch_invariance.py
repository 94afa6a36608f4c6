"""Matrix products whose rows do not depend on how many rows there are.

A library chooses the algorithm of a product by its shape, and with it the order in which it adds: one and the same row
comes out a rounding apart among 3 rows and among 30. Here every product is made of pieces of one fixed number of rows,
so that a row's result is a function of that row alone. Everything else in a decoder treats rows one by one already,
once their number is a multiple of the vector width; attention is cut into single queries (`RaggedBatch.by_token`).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode, _pop_mode

from orca_hf.errors import UnsupportedError

# Rows of every product: on a CPU the fewest at which a product runs at a good part of its speed, and no row of a
# decode-only iteration of 16 requests is wasted.
ROWS = 16

_aten = torch.ops.aten


class BatchInvariantProducts(TorchDispatchMode):
    """Within the block, on this thread: every matrix product runs in pieces of `ROWS` rows.

    Raises:
        UnsupportedError: At a product of a kind that is not built here.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Called for each operation below autograd."""
        product = _PRODUCTS.get(func)
        if product is not None:
            return product(*args, **(kwargs or {}))
        if func in _UNSUPPORTED:
            raise UnsupportedError(f"deterministic=True does not know how to run {func}")
        return func(*args, **(kwargs or {}))


def leave_batch_invariance() -> None:
    """Leave blocks of `BatchInvariantProducts` that an interruption has kept from being left."""
    while isinstance(_get_current_dispatch_mode(), BatchInvariantProducts):
        _pop_mode()


def _in_pieces(product: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """`product` of `rows` (num_rows, size), a piece at a time; (num_rows, other size)."""
    num_rows = len(rows)
    if num_rows == ROWS:
        return product(rows)
    if missing := -num_rows % ROWS:
        rows = torch.nn.functional.pad(rows, (0, 0, 0, missing))
    # A piece is a tensor of its own: where it begins in memory must not matter either.
    pieces = [product(piece.clone()) for piece in rows.split(ROWS)]
    return torch.cat(pieces)[:num_rows]


def _mm(left: Tensor, right: Tensor) -> Tensor:
    return _in_pieces(lambda piece: torch.mm(piece, right), left)


def _addmm(bias: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    if bias.dim() > 1 and bias.shape[0] > 1:
        return bias * beta + _mm(left, right) * alpha
    return _in_pieces(lambda piece: torch.addmm(bias, piece, right, beta=beta, alpha=alpha), left)


def _bmm(left: Tensor, right: Tensor) -> Tensor:
    # Up to ROWS the number is the model's (heads of a group), not the batch's, which is a multiple of ROWS.
    if left.shape[1] <= ROWS:
        return torch.bmm(left, right)
    return torch.cat([torch.bmm(piece.contiguous(), right) for piece in left.split(ROWS, dim=1)], dim=1)


def _grouped_mm(
    left: Tensor,
    right: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Rows (num_rows, size) sorted by group, weights (num_groups, size, other size), each group's end in `offs`."""
    if offs is None or left.dim() != 2 or right.dim() != 3 or bias is not None or out_dtype not in (None, left.dtype):
        raise UnsupportedError("deterministic=True does not know how to run this kind of grouped product")
    ends = offs.tolist()
    groups = zip([0, *ends], ends, right, strict=False)
    parts = [_mm(left[begin:end], weight) for begin, end, weight in groups if end > begin]
    # Rows past the last group belong to nobody.
    parts.append(left.new_zeros(len(left) - ends[-1], right.shape[2]))
    return torch.cat(parts)


_PRODUCTS: dict[Any, Callable[..., Tensor]] = {
    _aten.mm.default: _mm,
    _aten.addmm.default: _addmm,
    _aten.bmm.default: _bmm,
    _aten._grouped_mm.default: _grouped_mm,
}
_UNSUPPORTED = frozenset({
    _aten.baddbmm.default,
    _aten.convolution.default,
    _aten._int_mm.default,
    _aten._scaled_mm.default,
    _aten._weight_int4pack_mm.default,
    _aten._weight_int8pack_mm.default,
})  # fmt: skip
