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
from functools import cache
from importlib import import_module
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from transformers.activations import GELUTanh, SiLUActivation

from orca_hf.attention import attend_rows, judge
from orca_hf.attention_context import current_context
from orca_hf.packed_linear import is_changed
from orca_hf.parity import disagreement
from orca_hf.patches import StandIn
from orca_hf.same_code import Snapshot, has_same_forward
from orca_kernels.compiled import LINEAR_DTYPES, Library, RmsNorm

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
# With what it adds to its weight, and the name of its epsilon.
_NORMS = {
    "llama.LlamaRMSNorm": (0.0, "variance_epsilon"),
    "olmo2.Olmo2RMSNorm": (0.0, "variance_epsilon"),
    "gemma.GemmaRMSNorm": (1.0, "eps"),
}
_ACTIVATIONS: dict[type[nn.Module], bool] = {nn.SiLU: False, SiLUActivation: False, GELUTanh: True}  # is it GELU


def fuse_part(module: nn.Module, library: Library) -> "FusedForward | None":
    """A forward for a norm, an MLP or an attention, None where its own is none of those that are known here."""
    for name, (offset, eps) in _NORMS.items():
        if is_like(module, name):
            return FusedNorm(module, library, offset, getattr(module, eps))
    if is_like(module, _MLP):
        forward = FusedMLP(module, library)
        return forward if forward.is_possible() else None
    for name, window in _ATTENTIONS.items():
        if is_like(module, name):
            attention = FusedAttention(module, library, window, has_norms=name in _WITH_NORMS)
            return attention if attention.is_possible() else None
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

    Args:
        module: The module, whose forward is known.
        library: The kernels.

    Attributes:
        linears: The module's linears, whose products this forward computes from copies of its own.
        parts: Forwards of modules inside, whose work this one does.
        dtypes: Those of weights that it can be for.
    """

    __slots__ = ("is_right", "known", "library", "linears", "parts")

    is_batch_invariant = True  # the kernels' rows do not depend on how many there are
    dtypes = frozenset({torch.float32})

    def __init__(self, module: nn.Module, library: Library) -> None:
        super().__init__(module)
        self.library = library
        # Kept, since a module finds its children ten times as slowly.
        self.linears: tuple[nn.Linear, ...] = ()
        self.parts: tuple[FusedForward, ...] = ()
        self.known = Snapshot(type(module))
        self.is_right: bool | None = None  # not known before the first call

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
    """An RMS norm over the last dimension."""

    __slots__ = ("eps", "offset")

    def __init__(self, module: nn.Module, library: Library, offset: float, eps: float) -> None:
        super().__init__(module, library)
        self.offset = offset
        self.eps = eps

    def pack(self) -> None:
        """There is nothing to pack."""

    def norm(self) -> RmsNorm | None:
        """The norm as it is now, None if the kernels cannot read its weight."""
        weight = self.module._parameters["weight"]
        return RmsNorm(weight, self.eps, self.offset) if is_plain(weight) and weight.is_contiguous() else None

    def compute(self, hidden: Tensor) -> Tensor | None:
        """(..., size) to (..., size), in float32."""
        norm = self.norm()
        return self.library.rms_norm(hidden, norm) if norm is not None and is_plain(hidden) else None


class FusedMLP(FusedForward):
    """`down(activation(gate(x)) * up(x))`."""

    __slots__ = ("down", "dtype", "gate_up", "gelu")

    module: Any
    dtypes = LINEAR_DTYPES

    def __init__(self, module: nn.Module, library: Library) -> None:
        super().__init__(module, library)
        self.gelu = _ACTIVATIONS.get(type(self.module.act_fn))
        self.linears = (self.module.gate_proj, self.module.up_proj, self.module.down_proj)

    def is_possible(self) -> bool:
        """Whether the kernels have this activation; and none have a bias before it."""
        biases = (getattr(linear, "bias", None) for linear in self.linears[:2])
        return self.gelu is not None and all(bias is None for bias in biases)

    def pack(self) -> None:
        """Gate and up together, and down."""
        gate, up, down = (linear.weight for linear in self.linears)
        self.dtype = down.dtype
        self.gate_up = self.library.pack_gated(gate, up)
        self.down = self.library.pack(down)

    def compute(self, x: Tensor) -> Tensor | None:
        """(..., size) to (..., size), in the weights' dtype."""
        down = self.linears[2]
        if not is_plain(x, self.dtype):
            return None
        hidden = self.library.gated(x, self.gate_up, down.in_features, gelu=bool(self.gelu))
        return self.library.linear(hidden, self.down, down.bias, down.out_features)


class FusedAttention(FusedForward):
    """Q, K and V in one product, their norms and rotary embedding in the same call, the output's product."""

    __slots__ = ("head_norms", "num_heads", "output", "qkv", "window")

    module: Any

    def __init__(
        self, module: nn.Module, library: Library, window: Callable[[Any], int | None], *, has_norms: bool
    ) -> None:
        super().__init__(module, library)
        self.window = window
        self.linears = (self.module.q_proj, self.module.k_proj, self.module.v_proj, self.module.o_proj)
        norms = (self.module.q_norm, self.module.k_norm) if has_norms else ()
        self.parts = self.head_norms = tuple(FusedNorm(norm, library, 0.0, norm.variance_epsilon) for norm in norms)

    def is_possible(self) -> bool:
        """Whether the norms of query and key heads, if it has any, are known too."""
        norms = [norm.module for norm in self.head_norms]
        return all(is_like(norm, "llama.LlamaRMSNorm") and not is_changed(norm) for norm in norms)

    def pack(self) -> None:
        """Q, K and V together, and the output's."""
        self.num_heads = tuple(linear.out_features // self.module.head_dim for linear in self.linears[:3])
        *qkv, output = (linear.weight for linear in self.linears)
        self.qkv = self.library.pack(torch.cat(qkv))
        self.output = self.library.pack(output)

    def compute(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None] | None:
        """(1, num_rows, hidden_size) to the same, and no attention weights; in an iteration only."""
        attended = self.attend(
            hidden_states, None, position_embeddings, attention_mask, cache, is_trial=self.is_right is None, **kwargs
        )
        if attended is None:
            return None
        output = self.linears[3]
        return self.library.linear(attended, self.output, output.bias, output.out_features), None

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
        if position_embeddings is None or not is_plain(hidden_states) or hidden_states.shape[0] != 1:
            return None
        cos, sin = position_embeddings
        num_rows, head_dim = hidden_states.shape[1], module.head_dim
        if not (is_plain(cos) and is_plain(sin) and cos.shape == sin.shape == (1, num_rows, head_dim)):
            return None
        if cos.stride() != sin.stride() or cos.stride(2) != 1 or num_rows != context.num_rows:
            return None
        head_norms = [norm.norm() for norm in self.head_norms]
        if None in head_norms:
            return None

        bias = None
        if self.linears[0].bias is not None:
            bias = torch.cat([linear.bias for linear in self.linears[:3]])
        heads = self.library.attention_inputs(
            hidden_states[0], norm, self.qkv, bias, self.num_heads, cos[0], sin[0], *head_norms
        )
        window = self.window(module)
        attended = attend_rows(
            context,
            module,
            *heads[: context.batch.total_q].split(self.num_heads, dim=1),
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


def is_plain(tensor: Any, dtype: torch.dtype = torch.float32) -> TypeGuard[Tensor]:
    """Whether the kernels can read it: of that dtype on the CPU, no subclass that has ideas of its own."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.dtype is dtype and tensor.device.type == "cpu"


def _hidden(output: Any) -> Tensor:
    """The hidden states of a module's output, which for an attention is a tuple."""
    hidden: Tensor = output[0] if isinstance(output, tuple) else output
    return hidden
