"""A whole decoder layer in two calls of the compiled CPU kernels, with the attention between them."""

from typing import Any

from torch import Tensor, nn

from orca_hf.fused_forwards import FusedAttention, FusedForward, FusedMLP, FusedNorm, fuse_part, is_like, is_plain
from orca_hf.packed_linear import is_changed
from orca_kernels.compiled import Library, PackedProduct

_LAYER = "llama.LlamaDecoderLayer"


def fuse(module: nn.Module, library: Library) -> FusedForward | None:
    """A forward for `module` by the compiled kernels, None where its own is none of those that are known."""
    if not is_like(module, _LAYER):
        return fuse_part(module, library)
    layer: Any = module
    children = (layer.input_layernorm, layer.self_attn, layer.post_attention_layernorm, layer.mlp)
    if any(map(is_changed, children)):
        return None
    before, attention, after, mlp = (fuse_part(child, library) for child in children)
    if (
        isinstance(before, FusedNorm)
        and isinstance(attention, FusedAttention)
        and isinstance(after, FusedNorm)
        and isinstance(mlp, FusedMLP)
    ):
        return FusedLayer(module, library, before, attention, after, mlp)
    return None


class FusedLayer(FusedForward):
    """Attention of a norm, and a gated MLP of a norm, each added to what it was made of."""

    __slots__ = ("after", "attention", "before", "mlp")

    module: Any

    def __init__(
        self,
        module: nn.Module,
        library: Library,
        before: FusedNorm,
        attention: FusedAttention,
        after: FusedNorm,
        mlp: FusedMLP,
    ) -> None:
        super().__init__(module, library)
        self.before = before
        self.attention = attention
        self.after = after
        self.mlp = mlp
        self.linears = (*attention.linears, *mlp.linears)
        self.parts = (before, attention, *attention.parts, after, mlp)

    def pack(self) -> None:
        """What the attention and the MLP pack."""
        self.attention.pack()
        self.mlp.pack()

    def compute(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        use_cache: bool | None = False,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> Tensor | None:
        """(1, num_rows, hidden_size) to the same; in an iteration only."""
        before, after = self.before.norm(), self.after.norm()
        if before is None or after is None or not is_plain(hidden_states) or not hidden_states.is_contiguous():
            return None
        attended = self.attention.attend(
            hidden_states,
            before,
            position_embeddings,
            attention_mask,
            cache,
            is_trial=self.is_right is None,
            **kwargs,
        )
        if attended is None:
            return None
        output, down = self.attention.linears[3], self.mlp.linears[2]
        return self.library.layer_outputs(
            attended[0],
            hidden_states[0],
            PackedProduct(self.attention.output, output.bias, output.in_features),
            after,
            self.mlp.gate_up,
            PackedProduct(self.mlp.down, down.bias, down.in_features),
            gelu=bool(self.mlp.gelu),
        )[None]
