"""Forwards of the modules that nearly every decoder is made of, in few calls of the compiled CPU kernels.

A decode iteration of a small model spends more time between its products than in them: each of some sixty small
operations of a layer costs as much to call as to do. So whole modules get a forward of ours for the length of an
iteration, if theirs is known word for word (`same_code`): the RMS norm, the gated MLP, the attention with rotary
embedding; `fused_layer` makes a layer of them. Each must first show, in its first iteration, that it computes what the
module's own forward does.
"""

import logging
from abc import abstractmethod
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import GELUTanh, SiLUActivation

from orca_hf.attention import attend_rows, judge
from orca_hf.attention_context import current_context
from orca_hf.packed_linear import is_changed, is_plain, is_readable
from orca_hf.parity import disagreement
from orca_hf.patches import StandIn
from orca_hf.same_code import Snapshots, has_same_forward
from orca_kernels.compiled import LINEAR_DTYPES, Library, PackedProduct, RmsNorm

logger = logging.getLogger(__name__)

# The classes whose forwards are known, by their names in transformers' models; others that are the same follow.
_MLP = "llama.LlamaMLP"
# With the sliding window that it passes on.
_ATTENTIONS: dict[str, Callable[[Any], int | None]] = {
    "llama.LlamaAttention": lambda module: None,
    "mistral.MistralAttention": lambda module: getattr(module.config, "sliding_window", None),
    "qwen2.Qwen2Attention": lambda module: module.sliding_window,
    "qwen3.Qwen3Attention": lambda module: module.sliding_window,
}
_WITH_NORMS = frozenset({"qwen3.Qwen3Attention"})  # of each query and key head
_EPSILON = "variance_epsilon"
# With what it adds to its weight, and the name of its epsilon.
_NORMS = {
    "llama.LlamaRMSNorm": (0.0, _EPSILON),
    "olmo2.Olmo2RMSNorm": (0.0, _EPSILON),
    "gemma.GemmaRMSNorm": (1.0, "eps"),
}
_ACTIVATIONS: dict[type[nn.Module], bool] = {nn.SiLU: False, SiLUActivation: False, GELUTanh: True}  # is it GELU


def fuse_part(module: nn.Module, library: Library, snapshots: Snapshots) -> "FusedForward | None":
    """A forward for a norm, an MLP or an attention, None where its own is none of those that are known here."""
    forward = _make_part(module, library, snapshots)
    return forward if forward is not None and forward.is_possible() else None


def _make_part(module: nn.Module, library: Library, snapshots: Snapshots) -> "FusedForward | None":
    for name, (offset, eps) in _NORMS.items():
        if is_like(module, name):
            return FusedNorm(module, library, snapshots, offset, eps)
    if is_like(module, _MLP):
        return FusedMLP(module, library, snapshots)
    for name, window in _ATTENTIONS.items():
        if is_like(module, name):
            return FusedAttention(module, library, snapshots, window, has_norms=name in _WITH_NORMS)
    return None


def is_like(module: nn.Module, name: str) -> bool:
    """Whether a module's forward is that of a class of transformers' models, given as "model.Class"."""
    known = _import(name)
    return known is not None and has_same_forward(type(module), known)


@cache
def _import(name: str) -> type[nn.Module] | None:
    """A class of transformers' models, None where this transformers has none of that name."""
    model, class_name = name.split(".")
    try:
        found = getattr(import_module(f"transformers.models.{model}.modeling_{model}"), class_name, None)
    except ImportError:
        return None
    return found if isinstance(found, type) else None


class FusedForward(StandIn):
    """A module's forward in few calls; the module's own under autograd, under autocast and in another dtype.

    Numbers and tensors of the module are read when it is called. What is kept of it, its class and the modules inside
    it, `is_current` compares; the code that it stands for, `snapshots` show; copied weights, `PackedWeights` compares.

    Args:
        module: The module, whose forward is known.
        library: The kernels.
        snapshots: Of all classes.

    Attributes:
        linears: The module's linears, whose products this forward computes from copies of its own.
        parts: Forwards of modules inside, whose work this one does.
        code: Snapshots of the classes whose forwards it stands for, those of its parts included.
        dtypes: Those of weights that it can be for.
    """

    __slots__ = ("children", "code", "is_right", "library", "linears", "parts", "snapshot")

    is_batch_invariant = True  # the kernels' rows do not depend on how many there are
    dtypes = frozenset({torch.float32})

    def __init__(self, module: nn.Module, library: Library, snapshots: Snapshots) -> None:
        super().__init__(module)
        self.library = library
        self.children = dict(module._modules)
        self.snapshot = snapshots.of(type(module))
        self.code = frozenset({self.snapshot})
        # Kept, since a module finds its children ten times as slowly.
        self.linears: tuple[nn.Linear, ...] = ()
        self.parts: tuple[FusedForward, ...] = ()
        self.is_right: bool | None = None  # not known before the first call

    def is_possible(self) -> bool:
        """Whether the kernels can do what the module does as it is now."""
        is_original = all(snapshot.is_original for snapshot in self.code)
        return is_original and all(type(linear) is nn.Linear for linear in self.linears) and self.is_current()

    def is_current(self) -> bool:
        """Whether the module is of the class that it was, with nothing of its own, and has the same modules inside."""
        module = self.module
        return (
            type(module) is self.snapshot.function
            and module._modules == self.children
            and not is_changed(module, self.snapshot.methods)
        )

    @abstractmethod
    def pack(self) -> None:
        """Make the copies of the weights; asked for before the first call, under no_grad."""

    @abstractmethod
    def compute(self, *args: Any, **kwargs: Any) -> Any:
        """The forward's result, None where it cannot be had here."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward."""
        if self.is_right is False or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            return super().__call__(*args, **kwargs)
        output = self.compute(*args, **kwargs)
        if output is None:
            return super().__call__(*args, **kwargs)
        if self.is_right is None:
            expected = super().__call__(*args, **kwargs)
            same_kind = type(output) is type(expected)
            difference = disagreement(_hidden(output), _hidden(expected)) if same_kind else "in what it returns"
            self.is_right = difference is None
            if difference is not None:
                name = type(self.module).__name__
                logger.warning("%s differs from what it is known for, %s; it runs as it is.", name, difference)
            return expected
        return output


class FusedNorm(FusedForward):
    """An RMS norm over the last dimension.

    Args:
        module: As for every fused forward, like those that follow.
        library: Likewise.
        snapshots: Likewise.
        offset: Added to the weight.
        eps: The module's name for its epsilon.
    """

    __slots__ = ("eps", "offset")

    def __init__(
        self, module: nn.Module, library: Library, snapshots: Snapshots, offset: float = 0.0, eps: str = _EPSILON
    ) -> None:
        super().__init__(module, library, snapshots)
        self.offset = offset
        self.eps = eps

    def pack(self) -> None:
        """There is nothing to pack."""

    def norm(self, size: int) -> RmsNorm | None:
        """The norm of rows of `size` numbers as it is now, None if the kernels cannot do it."""
        eps: Any = self.module.__dict__.get(self.eps)
        weight = self.module._parameters.get("weight")
        # A bool or a tensor would count too, but who knows what is meant by it.
        if type(eps) not in (float, int) or not is_readable(weight, (size,)):
            return None
        return RmsNorm(weight, eps, self.offset)

    def compute(self, hidden: Tensor) -> Tensor | None:
        """(..., size) to (..., size), in float32."""
        if not is_plain(hidden) or hidden.dim() == 0:
            return None
        norm = self.norm(hidden.shape[-1])
        return None if norm is None else self.library.rms_norm(hidden, norm)


class FusedMLP(FusedForward):
    """`down(activation(gate(x)) * up(x))`."""

    __slots__ = ("activation", "down", "dtype", "gate_up", "gelu", "sizes")

    module: Any
    dtypes = LINEAR_DTYPES

    def __init__(self, module: nn.Module, library: Library, snapshots: Snapshots) -> None:
        super().__init__(module, library, snapshots)
        self.linears = (self.module.gate_proj, self.module.up_proj, self.module.down_proj)
        self.gelu = _ACTIVATIONS.get(type(self.module.act_fn))
        if self.gelu is not None:
            self.activation = snapshots.of(type(self.module.act_fn))
            self.code |= {snapshots.of(nn.Linear), self.activation}

    def is_possible(self) -> bool:
        """Whether the kernels have this activation, and the weights belong together."""
        if self.gelu is None or not super().is_possible():
            return False
        gate, up, down = (linear.weight for linear in self.linears)
        return gate.shape == up.shape and gate.shape[0] == down.shape[1]

    def is_current(self) -> bool:
        """The activation is what it was too; and there are no biases before it, which the kernels do not have."""
        activation: Any = self.children["act_fn"]
        gate, up, _ = self.linears
        return (
            super().is_current()
            and type(activation) is self.activation.function
            and not is_changed(activation, self.activation.methods)
            and (not self.gelu or _is_tanh(activation))
            and gate._parameters.get("bias") is None
            and up._parameters.get("bias") is None
        )

    def pack(self) -> None:
        """Gate and up together, and down."""
        gate, up, down = (linear.weight for linear in self.linears)
        self.dtype = down.dtype
        self.sizes = (gate.shape[1], gate.shape[0], down.shape[0])
        self.gate_up = self.library.pack_gated(gate, up)
        self.down = self.library.pack(down)

    def product(self) -> PackedProduct | None:
        """The last product as it is now, None if the kernels cannot read its bias."""
        _, num_in, num_out = self.sizes
        return _product(self.linears[2], self.down, (num_out, num_in), self.dtype)

    def compute(self, x: Tensor) -> Tensor | None:
        """(..., size) to (..., size), in the weights' dtype."""
        if not is_plain(x, self.dtype) or x.dim() == 0 or x.shape[-1] != self.sizes[0]:
            return None
        down = self.product()
        if down is None:
            return None
        hidden = self.library.gated(x, self.gate_up, self.sizes[1], gelu=bool(self.gelu))
        return self.library.linear(hidden, down.packed, down.bias, self.sizes[2])


class FusedAttention(FusedForward):
    """Q, K and V in one product, their norms and rotary embedding in the same call, the output's product."""

    __slots__ = ("head_norms", "num_in", "output", "output_sizes", "qkv", "sizes", "window")

    module: Any

    def __init__(
        self,
        module: nn.Module,
        library: Library,
        snapshots: Snapshots,
        window: Callable[[Any], int | None],
        *,
        has_norms: bool,
    ) -> None:
        super().__init__(module, library, snapshots)
        self.window = window
        self.linears = (self.module.q_proj, self.module.k_proj, self.module.v_proj, self.module.o_proj)
        norms = (self.module.q_norm, self.module.k_norm) if has_norms else ()
        self.parts = self.head_norms = tuple(FusedNorm(norm, library, snapshots) for norm in norms)
        self.code = self.code.union({snapshots.of(nn.Linear)}, *(norm.code for norm in self.head_norms))

    def is_possible(self) -> bool:
        """Whether the norms of query and key heads, if it has any, are known too, and the weights belong together."""
        if not super().is_possible() or not all(
            is_like(norm.module, "llama.LlamaRMSNorm") and norm.is_possible() for norm in self.head_norms
        ):
            return False
        query, key, value, output = (linear.weight.shape for linear in self.linears)
        return query[1] == key[1] == value[1] and key == value and query[0] == output[1]

    def pack(self) -> None:
        """Q, K and V together, and the output's."""
        *qkv, output = (linear.weight for linear in self.linears)
        self.sizes = tuple(len(weight) for weight in qkv)
        self.num_in = qkv[0].shape[1]
        self.output_sizes = (output.shape[0], output.shape[1])
        self.qkv = self.library.pack(torch.cat(qkv))
        self.output = self.library.pack(output)

    def product(self) -> PackedProduct | None:
        """The output's product as it is now, None if the kernels cannot read its bias."""
        return _product(self.linears[3], self.output, self.output_sizes, torch.float32)

    def compute(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None] | None:
        """(1, num_rows, hidden_size) to the same, and no attention weights; in an iteration only."""
        output = self.product()
        if output is None:
            return None
        attended = self.attend(
            hidden_states, None, position_embeddings, attention_mask, cache, is_trial=self.is_right is None, **kwargs
        )
        if attended is None:
            return None
        return self.library.linear(attended, output.packed, output.bias, self.output_sizes[0]), None

    def attend(
        self,
        hidden_states: Tensor,
        norm: RmsNorm | None,
        position_embeddings: tuple[Tensor, Tensor] | None,
        attention_mask: Tensor | None,
        cache: Any,
        *,
        is_trial: bool,
        **kwargs: Any,
    ) -> Tensor | None:
        """All but the output's product: (1, num_rows, num_heads * head_dim), contiguous.

        Args:
            hidden_states: (1, num_rows, hidden_size).
            norm: Of the hidden states, before anything else; None for none.
            position_embeddings: As for the module, like the arguments that follow.
            attention_mask: Likewise.
            cache: Likewise.
            is_trial: The module's own forward comes next.
            **kwargs: What the module would hand on to the attention function.
        """
        module, context = self.module, current_context()
        if context is None or cache is not None or kwargs.get("past_key_values") is not None:
            return None
        if position_embeddings is None or not is_plain(hidden_states) or hidden_states.dim() != 3:
            return None
        cos, sin = position_embeddings
        size, num_rows, num_in = hidden_states.shape
        head_dim = module.head_dim
        if size != 1 or num_in != self.num_in or any(size % head_dim for size in self.sizes):
            return None
        if not (is_plain(cos) and is_plain(sin) and cos.shape == sin.shape == (1, num_rows, head_dim)):
            return None
        if cos.stride() != sin.stride() or cos.stride(2) != 1 or num_rows != context.num_rows:
            return None
        head_norms = [norm.norm(head_dim) for norm in self.head_norms]
        biases: list[Tensor | None] = [linear._parameters["bias"] for linear in self.linears[:3]]
        # The kernel has one epsilon for both norms.
        if None in head_norms or len({norm.eps for norm in head_norms if norm is not None}) > 1:
            return None
        if not all(bias is None or is_readable(bias, (size,)) for bias, size in zip(biases, self.sizes, strict=True)):
            return None

        num_heads = tuple(size // head_dim for size in self.sizes)
        heads = self.library.attention_inputs(
            hidden_states[0], norm, self.qkv, self._joined(biases), num_heads, cos[0], sin[0], *head_norms
        )
        window = self.window(module)
        attended = attend_rows(
            context,
            module,
            *heads[: context.batch.total_q].split(num_heads, dim=1),
            scaling=module.scaling,
            dropout=module.attention_dropout if module.training else 0.0,
            sliding_window=window,
            chunk_size=judge(context, module, attention_mask, window),
            others=kwargs,
        )
        if is_trial:
            context.calls[module] -= 1  # the module's own forward counts
        attended = attended.view(1, context.batch.total_q, -1)
        padding = num_rows - context.batch.total_q
        return nn.functional.pad(attended, (0, 0, 0, padding)) if padding else attended

    def _joined(self, biases: list[Tensor | None]) -> Tensor | None:
        """The biases of Q, K and V, one after the other, with zeros for those that are not there; None if none is."""
        if biases == [None] * 3:
            return None
        return torch.cat(
            [
                torch.zeros(size, dtype=torch.float32, device="cpu") if bias is None else bias
                for bias, size in zip(biases, self.sizes, strict=True)
            ]
        )


def _product(linear: nn.Linear, packed: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> PackedProduct | None:
    """A linear of a packed weight of `shape` (num_out, num_in), as it is now; None if its bias cannot be read."""
    bias = linear._parameters["bias"]
    num_out, num_in = shape
    is_known = bias is None or is_readable(bias, (num_out,), dtype)
    return PackedProduct(packed, bias, num_in) if is_known else None


def _is_tanh(activation: Any) -> bool:
    """Whether transformers' GELU by tanh computes it by PyTorch's function, and not by one of its own."""
    act = activation.act
    return (
        type(act) is partial
        and act.func is torch._C._nn.gelu
        and not act.args
        and act.keywords == {"approximate": "tanh"}
    )


def _hidden(output: Any) -> Tensor:
    """The hidden states of a module's output, which for an attention is a tuple."""
    hidden: Tensor = output[0] if isinstance(output, tuple) else output
    return hidden
