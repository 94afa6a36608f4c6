"""Copies of a model's weights in the layouts that the CPU likes best, for as long as the weights stay the same.

The price is a second copy of the weights, and that a copy must never outlive the weight it was made from: see
`PackedWeights.refresh`.
"""

from collections.abc import Callable, Container, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from orca_hf.fused_forwards import FusedForward
from orca_hf.fused_layer import fuse
from orca_hf.packed_linear import PackedLinear, can_pack, is_changed
from orca_hf.patches import StandIn
from orca_hf.same_code import Snapshot, Snapshots
from orca_kernels import compiled

# Elements of a product that fit into a core's cache.
_CACHED = 2**18

Forward = FusedForward | PackedLinear


@dataclass(frozen=True, slots=True)
class _Source:
    """A linear's weight as it was when it was packed."""

    linear: nn.Linear
    weight: Tensor
    version: int
    pointer: int
    fingerprint: tuple[Tensor, ...]

    @classmethod
    def of(cls, linear: nn.Linear) -> "_Source":
        weight = linear.weight
        return cls(linear, weight, weight._version, weight.data_ptr(), _fingerprint(weight))

    def is_current(self) -> bool:
        """Whether the linear still holds the tensor that was packed, unchanged as far as PyTorch counts."""
        weight = self.linear._parameters.get("weight")  # by attribute it takes ten times as long
        return (
            weight is self.weight
            and type(self.linear) is nn.Linear
            and "bias" in self.linear._parameters
            and weight._version == self.version
            and weight.data_ptr() == self.pointer
            and not is_changed(self.linear)
        )


class PackedWeights:
    """Packed copies of a model's linear weights, and the forwards that compute from them.

    A weight may change under us in two ways. Ordinary writes (an optimizer's, `load_state_dict`, assignment of a new
    parameter) move the tensor's version counter, its identity or its address, which `refresh` checks before every
    iteration. Writes through `.data` move none of them; so `refresh(deep=True)`, called whenever the engine starts to
    work, also compares a fingerprint over every bit of every weight, at memory speed.

    Args:
        batch_invariant: Have only forwards of which a row's result does not depend on how many rows there are.

    Attributes:
        is_new: Copies have been made since this was set to False: some forwards have never run.
    """

    def __init__(self, *, batch_invariant: bool = False) -> None:
        self.is_new = False
        self._batch_invariant = batch_invariant
        self._sources: dict[Forward, tuple[_Source, ...]] = {}
        self._modules: set[nn.Module] = set()  # those that a stand-in, or a linear's, stands for
        self._snapshots = Snapshots()

    @property
    def num_bytes(self) -> int:
        """Bytes that the packed copies take."""
        weights = [source.weight for sources in self._sources.values() for source in sources]
        return sum(weight.numel() * weight.element_size() for weight in weights)

    @property
    def forwards(self) -> list[StandIn]:
        """For each module the forward to run in place of its own."""
        return list(self._sources)

    def clear(self) -> None:
        """Drop all packed copies."""
        self._sources.clear()
        self._modules.clear()
        self._snapshots = Snapshots()

    def pack(self, modules: Iterable[nn.Module], max_bytes: Callable[[], int]) -> None:
        """Pack what can be among `modules`, and is not yet; all of it or nothing.

        Args:
            modules: The model's modules.
            max_bytes: Says how much memory the new copies may take; asked only if there are any.
        """
        found = self._find(module for module in modules if module not in self._modules)
        weights = [linear.weight for forward in found for linear in forward.linears]
        needed = sum(weight.numel() * weight.element_size() for weight in weights)
        if needed and needed <= max_bytes():
            self._add(found)

    def refresh(self, *, deep: bool) -> None:
        """Pack anew what is no longer what it was; after this, every packed copy equals its weight.

        Args:
            deep: Compare the weights' contents too, not only PyTorch's own bookkeeping.
        """
        known = self._snapshots.current()
        for forward, sources in list(self._sources.items()):
            if _is_current(forward, known) and all(
                source.is_current() and not (deep and not _same(source.fingerprint, _fingerprint(source.weight)))
                for source in sources
            ):
                continue
            del self._sources[forward]
            modules = _modules_of(forward)
            self._modules.difference_update(modules)
            self._add(self._find(modules))

    def _find(self, modules: Iterable[nn.Module]) -> list[Forward]:
        found = _find_forwards(modules, self._snapshots)
        return [forward for forward in found if forward.is_batch_invariant] if self._batch_invariant else found

    def _add(self, found: Iterable[Forward]) -> None:
        with torch.no_grad():
            for forward in found:
                forward.pack()
                self._sources[forward] = tuple(map(_Source.of, forward.linears))
                self._modules.update(_modules_of(forward))
                self.is_new = True


def _fused(forward: Forward) -> tuple[FusedForward, ...]:
    """The forward and those whose work it does, if it is a fused one."""
    return (forward, *forward.parts) if isinstance(forward, FusedForward) else ()


def _modules_of(forward: Forward) -> dict[nn.Module, None]:
    """The modules whose work a forward does, each before those inside it."""
    return dict.fromkeys((forward.module, *(part.module for part in _fused(forward)), *forward.linears))


def _is_current(forward: Forward, known: AbstractSet[Snapshot]) -> bool:
    """Whether all code whose work a stand-in does is what it was made for, and the modules hold each other as then."""
    return forward.code <= known and all(each.is_current() for each in _fused(forward))


def _find_forwards(modules: Iterable[nn.Module], snapshots: Snapshots) -> list[Forward]:
    """What can stand in for the forwards of `modules`, of which each comes before those inside it."""
    left = dict.fromkeys(modules)
    packable = dict.fromkeys(filter(can_pack, left))
    linear = snapshots.of(nn.Linear)
    if not packable or not linear.is_original:
        return []
    found: list[Forward] = []
    library = compiled.library()
    if library is not None:
        for module in list(left):
            if module not in left or is_changed(module) or (forward := fuse(module, library, snapshots)) is None:
                continue
            if _can_read(forward, packable):
                found.append(forward)
                for taken in _modules_of(forward):
                    left.pop(taken, None)
    return [*found, *(PackedLinear(each, linear) for each in packable if each in left)]


def _can_read(forward: FusedForward, packable: Container[nn.Linear]) -> bool:
    """Whether the kernels can read the weights of a fused forward, all of one dtype that it is for."""
    weights = [linear.weight for linear in forward.linears]
    return (
        all(linear in packable for linear in forward.linears)
        and len({weight.dtype for weight in weights}) <= 1
        and all(weight.dtype in forward.dtypes and compiled.can_read(weight) for weight in weights)
    )


def _fingerprint(weight: Tensor) -> tuple[Tensor, ...]:
    """Numbers for every row that change with it: with the smallest change of one value, with an exchange of columns."""
    weight = weight.detach()
    row_bytes = weight.shape[1] * weight.element_size()
    library = compiled.library()
    if library is not None and row_bytes % 4 == 0:
        return (library.fingerprint(weight, _factors(row_bytes // 4)),)
    # The sum of its bits sees the smallest change of one value, its product with a fixed random vector any change that
    # moves what the linear computes.
    begin = weight.storage_offset() * weight.element_size()
    words = (torch.int64, torch.int32, torch.int16)
    widest = next(word for word in words if row_bytes % word.itemsize == begin % word.itemsize == 0)
    bits = weight.reshape(-1).view(widest).unflatten(0, (len(weight), -1)).sum(dim=1, dtype=torch.int64)
    direction = _direction(weight.shape[1])
    # In pieces that stay in the cache: twice as fast as one product, which would write the weight's size to memory.
    pieces = [(piece.float() * direction).sum(dim=1) for piece in weight.split(max(1, _CACHED // weight.shape[1]))]
    return bits, torch.cat(pieces).view(torch.int32)  # as bits, so that NaN equals itself


@cache
def _factors(size: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(0)
    return torch.randint(1, 2**31 - 1, (size,), generator=generator, dtype=torch.int32, device="cpu")


@cache
def _direction(size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator("cpu").manual_seed(0), dtype=torch.float32, device="cpu")


def _same(left: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> bool:
    return all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(left, right, strict=True))
