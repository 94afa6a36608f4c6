"""One iteration as the attention modules see it; it travels in a context variable, so it belongs to its thread."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PretrainedConfig

from orca_hf.errors import UnsupportedError
from orca_hf.kv_pool import KVPool
from orca_kernels import RaggedBatch


@dataclass(slots=True)
class AttentionContext:
    """One iteration, as the attention modules see it.

    Attributes:
        pool: K/V memory.
        batch: Which tokens belong to whom.
        num_rows: Rows of the flat batch: the batch's tokens, and padding after them.
        batch_invariant: Attend so that a token's result depends on its own request alone, to the last bit.
        tables: What a model's attention adapters keep from iteration to iteration; None for a model without any.
        calls: How many times each attention module has run.
        mask_windows: Window or chunk sizes that the model asked a mask for.
        windows: The attention modules, each with the size of its window or chunk; None for those without one.
    """

    pool: KVPool
    batch: RaggedBatch
    num_rows: int
    batch_invariant: bool = False
    tables: dict[Any, Tensor] | None = None
    calls: dict[nn.Module, int] = field(default_factory=dict)
    mask_windows: set[int] = field(default_factory=set)
    windows: set[tuple[nn.Module, int | None]] = field(default_factory=set)
    _views: dict[tuple[torch.device, bool, int | None], RaggedBatch] = field(default_factory=dict)

    def batch_on(self, device: torch.device, *, attends: bool = False, chunk_size: int | None = None) -> RaggedBatch:
        """The batch on `device`, made once in an iteration; for attention cut as the layer and the settings want it."""
        found = self._views.get((device, attends, chunk_size))
        if found is None:
            if chunk_size is not None and chunk_size % self.batch.block_size:
                raise UnsupportedError(
                    f"its chunks of {chunk_size} positions are no multiple of block_size {self.batch.block_size}"
                )
            batch = self.batch if chunk_size is None else self.batch.chunked(chunk_size)
            if attends and self.batch_invariant:
                batch = batch.by_token()
            found = self._views[device, attends, chunk_size] = batch.to(device)
        return found

    def check(self) -> None:
        """Refuse, after the forward, what the calls one by one could not show.

        Raises:
            UnsupportedError: No attention module used the interface, or a window was put in a mask only.
        """
        if not self.calls:
            raise UnsupportedError("none of its modules calls the registered attention function")
        if unused := self.mask_windows - {window for _, window in self.windows}:
            raise UnsupportedError(f"it limits attention to {sorted(unused)} tokens by a mask alone")

    def check_windows(self, config: PretrainedConfig) -> None:
        """Refuse a model whose native masks or cache forget other tokens than its attention does.

        Raises:
            UnsupportedError: Their windows differ, or are too small for the native cache to keep any token.
        """
        native = {getattr(layer, "sliding_window", None) for layer in DynamicCache(config=config).layers} or {None}
        ours = {window for _, window in self.windows}
        if native != ours or 1 in ours:
            raise UnsupportedError(f"its attention looks back over {ours} tokens, and its native cache keeps {native}")
        # Natively the mask limits a layer, and it is the config's types that say which mask; modules keep their own.
        layer_types = getattr(config, "layer_types", None) or ()
        for module, window in self.windows:
            layer = getattr(module, "layer_idx", None)
            if not isinstance(layer, int) or layer >= len(layer_types):
                continue
            if (layer_types[layer] == "full_attention") != (window is None):
                raise UnsupportedError(
                    f"the attention of layer {layer} looks back over {window} tokens, and its config says "
                    f"{layer_types[layer]}"
                )


_context: ContextVar[AttentionContext | None] = ContextVar("orca_attention_context", default=None)


def current_context() -> AttentionContext | None:
    """The iteration that this thread runs, None if it runs none."""
    return _context.get()


@contextmanager
def attention_context(context: AttentionContext | None) -> Iterator[None]:
    """Run this thread's attention on `context` within the block; None for the user's, also within an iteration."""
    token = _context.set(context)
    try:
        yield
    finally:
        _context.reset(token)


def leave_iteration() -> None:
    """This thread runs no iteration any more, wherever one was interrupted."""
    _context.set(None)
