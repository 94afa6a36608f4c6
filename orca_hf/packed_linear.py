"""One linear, computed from its weight in the layout that the CPU's matrix product likes best.

A decode iteration has few rows, and a plain matrix product spends most of such a call reordering the weight. A weight
can be kept reordered instead: for the compiled kernels where there is a compiler, else for oneDNN. Measured on
SmolLM2-135M in fp32, oneDNN's makes the linears 1.5 to 2 times faster than plain ones between 1 and 64 rows, and the
compiled kernels' is another 1.2 to 2 times faster; in bf16, oneDNN's saves a third.
"""

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from orca_hf.patches import StandIn
from orca_hf.same_code import Snapshot
from orca_kernels import compiled

# Below this a packed product's fixed cost, 12 us, is more than it saves (measured at 1 to 64 rows).
_MIN_ELEMENTS = 2**16
_DTYPES = frozenset({torch.float32, torch.bfloat16})

_OF_LINEAR = frozenset({"forward", "weight", "bias"})

# From rows (..., num_in) and a bias (num_out,) or None to (..., num_out).
Product = Callable[[Tensor, Tensor | None], Tensor]


def can_pack(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether `module` is a plain linear on the CPU in fp32 or bf16, its forward and its calls its class's."""
    if type(module) is not nn.Linear or is_changed(module) or not torch.backends.mkldnn.is_available():
        return False
    weight = module.weight
    return (
        "bias" in module._parameters
        and weight.device.type == "cpu"
        and weight.dtype in _DTYPES
        and type(weight) is nn.Parameter
        and weight.is_contiguous()
        and not weight.is_inference()  # an inference tensor has no version counter
        and weight.numel() >= _MIN_ELEMENTS
    )


def is_changed(module: nn.Module, methods: AbstractSet[str] = _OF_LINEAR) -> bool:
    """Whether a module has something of its own where its class's is expected, or hooks around its forward.

    Args:
        module: The module.
        methods: Names of what is expected to be its class's, or PyTorch's for its class.
    """
    own = module.__dict__
    if own["_forward_hooks"] or own["_forward_pre_hooks"]:
        return True
    # Asked of every module before every iteration.
    return not own.keys().isdisjoint(methods) and any(
        name in own and not isinstance(own[name], StandIn) for name in methods
    )


def is_readable(parameter: Any, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> TypeGuard[Tensor]:
    """Whether the kernels can read a parameter by its address: of that shape and dtype, contiguous, aligned."""
    return (
        is_plain(parameter, dtype)
        and parameter.shape == shape
        and parameter.is_contiguous()
        and parameter.data_ptr() % dtype.itemsize == 0
    )


def is_plain(tensor: Any, dtype: torch.dtype = torch.float32) -> TypeGuard[Tensor]:
    """Whether the kernels can read it: of that dtype on the CPU, no subclass that has ideas of its own."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.dtype is dtype and tensor.is_cpu


class PackedLinear(StandIn):
    """The packed product; under autograd, under autocast and in another dtype the linear's own.

    Args:
        module: The linear.
        snapshot: Of its class.
    """

    __slots__ = ("code", "dtype", "product", "shape")

    module: nn.Linear

    def __init__(self, module: nn.Linear, snapshot: Snapshot) -> None:
        super().__init__(module)
        self.code = frozenset({snapshot})

    @property
    def linears(self) -> tuple[nn.Linear, ...]:
        """The linears whose weights it has copies of."""
        return (self.module,)

    @property
    def is_batch_invariant(self) -> bool:
        """Whether a row's result does not depend on how many rows there are: the compiled kernels' does not."""
        return compiled.library() is not None and compiled.can_read(self.module.weight)

    def pack(self) -> None:
        """Make the copy of the weight; asked for before the first call, under no_grad."""
        weight = self.module.weight
        self.dtype = weight.dtype
        self.shape = weight.shape
        self.product = _make_product(weight.detach())

    def __call__(self, hidden: Tensor) -> Tensor:
        """(..., num_in) to (..., num_out)."""
        num_out, num_in = self.shape
        bias = self.module.bias
        if (
            torch.is_grad_enabled()
            or not is_plain(hidden, self.dtype)
            or hidden.dim() == 0
            or hidden.shape[-1] != num_in
            or torch.is_autocast_enabled("cpu")
            or not (bias is None or is_readable(bias, (num_out,), self.dtype))
        ):
            own: Tensor = super().__call__(hidden)
            return own
        return self.product(hidden, bias)


def _make_product(weight: Tensor) -> Product:
    library = compiled.library()
    if library is not None and compiled.can_read(weight):
        num_out, packed = weight.shape[0], library.pack(weight)
        return lambda rows, bias: library.linear(rows, packed, bias, num_out)
    reordered = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return lambda rows, bias: torch.ops.mkldnn._linear_pointwise(rows, reordered, bias, "none", [], "")
