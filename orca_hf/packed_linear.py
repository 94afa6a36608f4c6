"""Linear weights in the layout that the CPU's matrix product likes best, for as long as the weights stay the same.

A decode iteration has few rows, and a plain matrix product spends most of such a call reordering the weight. A weight
can be kept reordered instead: for the compiled kernels where there is a compiler, else for oneDNN. Measured on
SmolLM2-135M in fp32, oneDNN's makes the linears 1.5 to 2 times faster than plain ones between 1 and 64 rows, and the
compiled kernels' is another 1.2 to 2 times faster; in bf16, oneDNN's saves a third. The price is a second copy of the
weights, and that a packed copy must never outlive the weight it was made from: see `PackedLinears.refresh`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import TypeGuard

import torch
from torch import Tensor, nn

from orca_hf.patches import StandIn
from orca_kernels import compiled

# Below this a packed product's fixed cost, 12 us, is more than it saves (measured at 1 to 64 rows).
_MIN_ELEMENTS = 2**16
_DTYPES = frozenset({torch.float32, torch.bfloat16})
# Elements of a product that fit into a core's cache.
_CACHED = 2**18

# From rows (..., num_in) and a bias (num_out,) or None to (..., num_out).
Product = Callable[[Tensor, Tensor | None], Tensor]


@dataclass(frozen=True, slots=True)
class _Packed:
    """A module's packed weight and what it was made from."""

    module: nn.Linear
    weight: Tensor
    version: int
    pointer: int
    fingerprint: tuple[Tensor, Tensor]
    forward: "_PackedForward"

    def is_current(self) -> bool:
        """Whether the module still holds the tensor that was packed, unchanged as far as PyTorch counts."""
        weight = self.module._parameters.get("weight")  # by attribute it takes ten times as long
        return (
            weight is self.weight
            and weight._version == self.version
            and weight.data_ptr() == self.pointer
            and "forward" not in self.module.__dict__  # a user's own, set since
        )


class PackedLinears:
    """Packed copies of a model's linear weights.

    A weight may change under us in two ways. Ordinary writes (an optimizer's, `load_state_dict`, assignment of a new
    parameter) move the tensor's version counter, its identity or its address, which `refresh` checks before every
    iteration. Writes through `.data` move none of them; so `refresh(deep=True)`, called whenever the engine starts to
    work, also compares a fingerprint over every bit of every weight, at memory speed.
    """

    def __init__(self) -> None:
        self._packed: dict[nn.Linear, _Packed] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes that the packed copies take."""
        return sum(entry.weight.numel() * entry.weight.element_size() for entry in self._packed.values())

    @property
    def forwards(self) -> list[StandIn]:
        """For each packed module the forward to run in place of its own."""
        return [entry.forward for entry in self._packed.values()]

    def clear(self) -> None:
        """Drop all packed copies."""
        self._packed.clear()

    def pack(self, modules: Iterable[nn.Module], max_bytes: Callable[[], int]) -> None:
        """Pack every linear among `modules` that can be, and is not yet; all of them or none.

        Args:
            modules: The model's modules.
            max_bytes: Says how much memory the new copies may take; asked only if there are any.
        """
        new = [module for module in modules if module not in self._packed and can_pack(module)]
        needed = sum(module.weight.numel() * module.weight.element_size() for module in new)
        if needed == 0 or needed > max_bytes():
            return
        for module in new:
            self._packed[module] = _pack(module)

    def refresh(self, *, deep: bool) -> None:
        """Pack anew what is no longer what it was; after this, every packed copy equals its weight.

        Args:
            deep: Compare the weights' contents too, not only PyTorch's own bookkeeping.
        """
        for module, entry in list(self._packed.items()):
            if entry.is_current() and not (deep and not _same(entry.fingerprint, _fingerprint(module.weight))):
                continue
            del self._packed[module]
            if can_pack(module):
                self._packed[module] = _pack(module)


def can_pack(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether `module` is a plain linear on the CPU in fp32 or bf16, with nothing of the user's in its forward."""
    if type(module) is not nn.Linear or "forward" in module.__dict__ or not torch.backends.mkldnn.is_available():
        return False
    weight = module.weight
    return (
        weight.device.type == "cpu"
        and weight.dtype in _DTYPES
        and type(weight) is nn.Parameter
        and weight.is_contiguous()
        and not weight.is_inference()  # an inference tensor has no version counter
        and weight.numel() >= _MIN_ELEMENTS
    )


class _PackedForward(StandIn):
    """The packed product; under autograd, under autocast and in another dtype the linear's own."""

    __slots__ = ("dtype", "product")

    module: nn.Linear

    def __init__(self, module: nn.Linear, product: Product) -> None:
        super().__init__(module)
        self.dtype = module.weight.dtype
        self.product = product

    def __call__(self, hidden: Tensor) -> Tensor:
        bias = self.module.bias
        if (
            torch.is_grad_enabled()
            or type(hidden) is not Tensor
            or hidden.dtype is not self.dtype
            or hidden.device.type != "cpu"
            or torch.is_autocast_enabled("cpu")
            or not (bias is None or (bias.dtype is self.dtype and bias.is_contiguous()))
        ):
            return nn.functional.linear(hidden, self.module.weight, bias)
        return self.product(hidden, bias)


def _pack(module: nn.Linear) -> _Packed:
    weight = module.weight
    with torch.no_grad():
        forward = _PackedForward(module, _make_product(weight.detach()))
        fingerprint = _fingerprint(weight)
    return _Packed(module, weight, weight._version, weight.data_ptr(), fingerprint, forward)


def _make_product(weight: Tensor) -> Product:
    library = compiled.library()
    if library is not None and weight.dtype is torch.float32:
        num_out, packed = weight.shape[0], library.pack(weight)
        return lambda rows, bias: library.linear(rows, packed, bias, num_out)
    reordered = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return lambda rows, bias: torch.ops.mkldnn._linear_pointwise(rows, reordered, bias, "none", [], "")


def _fingerprint(weight: Tensor) -> tuple[Tensor, Tensor]:
    """For every row the sum of its bits, and its product with a fixed random vector.

    The first sees the smallest change of one value, the second any change that moves what the linear computes: an
    exchange of columns, a flip of signs.
    """
    weight = weight.detach()
    row_bytes = weight.shape[1] * weight.element_size()
    words = next(word for word in (torch.int64, torch.int32, torch.int16) if row_bytes % word.itemsize == 0)
    bits = weight.view(words).sum(dim=1, dtype=torch.int64)
    direction = _direction(weight.shape[1])
    # In pieces that stay in the cache: twice as fast as one product, which would write the weight's size to memory.
    pieces = [(piece.float() * direction).sum(dim=1) for piece in weight.split(max(1, _CACHED // weight.shape[1]))]
    return bits, torch.cat(pieces).view(torch.int32)  # as bits, so that NaN equals itself


@cache
def _direction(size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(0))


def _same(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> bool:
    return all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(left, right, strict=True))
