"""A whole decoder layer in two calls of the compiled CPU kernels, with the attention between them."""

from typing import Any

from torch import Tensor, nn

from orca_hf.fused_forwards import FusedAttention, FusedForward, FusedMLP, FusedNorm, fuse_part, is_like
from orca_hf.packed_linear import is_plain
from orca_hf.same_code import Snapshots
from orca_kernels.compiled import Library

_LAYER = "llama.LlamaDecoderLayer"


def fuse(module: nn.Module, library: Library, snapshots: Snapshots) -> FusedForward | None:
    """A forward for `module` by the compiled kernels, None where its own is none of those that are known."""
    if not is_like(module, _LAYER):
        return fuse_part(module, library, snapshots)
    names = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
    children = [module._modules.get(name) for name in names]
    before, attention, after, mlp = (
        None if child is None else fuse_part(child, library, snapshots) for child in children
    )
    if (
        isinstance(before, FusedNorm)
        and isinstance(attention, FusedAttention)
        and isinstance(after, FusedNorm)
        and isinstance(mlp, FusedMLP)
    ):
        layer = FusedLayer(module, library, snapshots, before, attention, after, mlp)
        return layer if layer.is_possible() else None
    return None


class FusedLayer(FusedForward):
    """Attention of a norm, and a gated MLP of a norm, each added to what it was made of."""

    __slots__ = ("after", "attention", "before", "mlp")

    module: Any

    def __init__(
        self,
        module: nn.Module,
        library: Library,
        snapshots: Snapshots,
        before: FusedNorm,
        attention: FusedAttention,
        after: FusedNorm,
        mlp: FusedMLP,
    ) -> None:
        super().__init__(module, library, snapshots)
        self.before = before
        self.attention = attention
        self.after = after
        self.mlp = mlp
        self.linears = (*attention.linears, *mlp.linears)
        self.parts = (before, attention, *attention.parts, after, mlp)
        self.code = self.code.union(*(part.code for part in self.parts))

    def is_possible(self) -> bool:
        """Whether the products fit together too."""
        output, gate, down = (linear.weight.shape for linear in (self.linears[3], *self.mlp.linears[::2]))
        return super().is_possible() and self.linears[0].weight.shape[1] == output[0] == gate[1] == down[0]

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
        if not is_plain(hidden_states) or not hidden_states.is_contiguous() or hidden_states.dim() != 3:
            return None
        size = self.attention.num_in
        before, after = self.before.norm(size), self.after.norm(size)
        output, down = self.attention.product(), self.mlp.product()
        if before is None or after is None or output is None or down is None:
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
        return self.library.layer_outputs(
            attended[0],
            hidden_states[0],
            output,
            after,
            self.mlp.gate_up,
            down,
            gelu=bool(self.mlp.gelu),
        )[None]
