"""Forwards of the modules that nearly every decoder is made of, in few calls of the compiled CPU kernels.

A decode iteration of a small model spends more time between its products than in them: each of some sixty small
operations of a layer costs as much to call as to do. So whole modules get a forward of ours for the length of an
iteration, if theirs is known word for word (`same_code`): the RMS norm, the gated MLP, the attention with rotary
embedding. Each must first show, in its first iteration, that it computes what the module's own forward does.
"""

import logging
from abc import abstractmethod
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import GELUTanh, SiLUActivation

from orca_hf.attention import attention_forward
from orca_hf.attention_context import current_context
from orca_hf.parity import disagreement
from orca_hf.patches import StandIn
from orca_hf.same_code import Snapshot, has_same_forward
from orca_kernels.compiled import Library

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


def fuse(module: nn.Module, library: Library) -> "FusedForward | None":
    """A forward for `module` by the compiled kernels, None where its own is none of those that are known here."""
    for name, (offset, eps) in _NORMS.items():
        if _is_like(module, name):
            return FusedNorm(module, library, offset, getattr(module, eps))
    if _is_like(module, _MLP):
        forward = FusedMLP(module, library)
        return forward if forward.is_possible() else None
    for name, window in _ATTENTIONS.items():
        if _is_like(module, name):
            attention = FusedAttention(module, library, window, has_norms=name in _WITH_NORMS)
            return attention if attention.is_possible() else None
    return None


def _is_like(module: nn.Module, name: str) -> bool:
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
    """

    __slots__ = ("is_right", "known", "library")

    def __init__(self, module: nn.Module, library: Library) -> None:
        super().__init__(module)
        self.library = library
        self.known = Snapshot(type(module))
        self.is_right: bool | None = None  # not known before the first call

    @property
    def linears(self) -> tuple[nn.Linear, ...]:
        """The module's linears, whose products this forward computes from copies of its own."""
        return ()

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
            difference = disagreement(_hidden(output), _hidden(expected))
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

    def compute(self, hidden: Tensor) -> Tensor | None:
        """(..., size) to (..., size), in float32."""
        weight = self.module._parameters["weight"]
        if weight is None or not (_is_plain(hidden) and _is_plain(weight) and weight.is_contiguous()):
            return None
        return self.library.rms_norm(hidden, weight, offset=self.offset, eps=self.eps)


class FusedMLP(FusedForward):
    """`down(activation(gate(x)) * up(x))`."""

    __slots__ = ("down", "gate_up", "gelu")

    module: Any

    def __init__(self, module: nn.Module, library: Library) -> None:
        super().__init__(module, library)
        self.gelu = _ACTIVATIONS.get(type(self.module.act_fn))

    def is_possible(self) -> bool:
        """Whether the kernels have this activation; and none have a bias before it."""
        biases = (getattr(linear, "bias", None) for linear in (self.module.gate_proj, self.module.up_proj))
        return self.gelu is not None and all(bias is None for bias in biases)

    @property
    def linears(self) -> tuple[nn.Linear, ...]:
        """All of them."""
        return self.module.gate_proj, self.module.up_proj, self.module.down_proj

    def pack(self) -> None:
        """Gate and up together, and down."""
        gate, up, down = (linear.weight for linear in self.linears)
        self.gate_up = self.library.pack_gated(gate, up)
        self.down = self.library.pack(down)

    def compute(self, x: Tensor) -> Tensor | None:
        """(..., size) to (..., size), in float32."""
        down = self.module.down_proj
        if not _is_plain(x):
            return None
        hidden = self.library.gated(x, self.gate_up, down.in_features, gelu=bool(self.gelu))
        return self.library.linear(hidden, self.down, down.bias, down.out_features)


class FusedAttention(FusedForward):
    """Q, K and V in one product, their norms and rotary embedding in one call, the output's product."""

    __slots__ = ("has_norms", "output", "qkv", "window")

    module: Any

    def __init__(
        self, module: nn.Module, library: Library, window: Callable[[Any], int | None], *, has_norms: bool
    ) -> None:
        super().__init__(module, library)
        self.window = window
        self.has_norms = has_norms

    def is_possible(self) -> bool:
        """Whether the norms of query and key heads, if it has any, are known too."""
        norms = (self.module.q_norm, self.module.k_norm) if self.has_norms else ()
        return all(_is_like(norm, "llama.LlamaRMSNorm") for norm in norms)

    @property
    def linears(self) -> tuple[nn.Linear, ...]:
        """All of them."""
        return self.module.q_proj, self.module.k_proj, self.module.v_proj, self.module.o_proj

    def pack(self) -> None:
        """Q, K and V together, and the output's."""
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
        module, context = self.module, current_context()
        if context is None or cache is not None or kwargs.get("past_key_values") is not None:
            return None
        if position_embeddings is None or not _is_plain(hidden_states) or hidden_states.shape[0] != 1:
            return None
        cos, sin = position_embeddings
        head_dim = module.head_dim
        if not (_is_plain(cos) and _is_plain(sin) and cos.shape == sin.shape == (1, hidden_states.shape[1], head_dim)):
            return None
        if cos.stride() != sin.stride() or cos.stride(2) != 1:
            return None
        norms: list[Tensor] = []
        eps = 0.0
        if self.has_norms:
            norms = [module.q_norm.weight, module.k_norm.weight]
            eps = module.q_norm.variance_epsilon
            if not all(_is_plain(weight) and weight.is_contiguous() for weight in norms):
                return None

        projections = module.q_proj, module.k_proj, module.v_proj
        widths = [linear.out_features for linear in projections]
        num_q_heads, num_kv_heads = widths[0] // head_dim, widths[1] // head_dim
        bias = None
        if projections[0].bias is not None:
            bias = torch.cat([linear.bias for linear in projections])
        qkv = self.library.linear(hidden_states[0], self.qkv, bias, sum(widths))
        self.library.rotate(qkv, num_q_heads, num_kv_heads, cos[0], sin[0], *norms, eps=eps)
        # As an attention module hands them over: (1, heads, rows, head_dim).
        heads = qkv.view(1, len(qkv), -1, head_dim).transpose(1, 2)
        query, key, value = heads.split([num_q_heads, num_kv_heads, num_kv_heads], dim=1)
        attended, weights = attention_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=module.attention_dropout if module.training else 0.0,
            scaling=module.scaling,
            sliding_window=self.window(module),
            **kwargs,
        )
        if self.is_right is None:
            context.calls[module] -= 1  # the module's own forward comes next, and counts
        attended = attended.reshape(1, len(qkv), -1)
        output = module.o_proj
        return self.library.linear(attended, self.output, output.bias, output.out_features), weights


def _is_plain(tensor: Any) -> bool:
    """Whether the kernels can read it: float32 on the CPU, no subclass that has ideas of its own."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.dtype is torch.float32 and tensor.device.type == "cpu"


def _hidden(output: Any) -> Tensor:
    """The hidden states of a module's output, which for an attention is a tuple."""
    hidden: Tensor = output[0] if isinstance(output, tuple) else output
    return hidden
