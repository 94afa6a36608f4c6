"""Orca's attention, as transformers calls it: the registered attention and mask functions.

The functions are registered once, under the name `orca`. A model's configs name them for the length of an iteration
only (`patches.py`), and the iteration travels in a context variable, so it belongs to the thread that runs it. A
forward of the same model on another thread meanwhile finds the name but no iteration, and is passed on to the
implementation that the user chose.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig

from orca_hf.attention_context import AttentionContext, current_context
from orca_hf.attention_name import IMPLEMENTATION, user_implementation
from orca_hf.errors import UnsupportedError
from orca_kernels import selective_attention, store_kv

if TYPE_CHECKING:
    from typing_extensions import Required, Unpack  # typing has them from Python 3.11 on

# Arguments that reach an attention function and do not change what it computes for one flattened, unpadded batch.
_HARMLESS = frozenset({
    "cache",
    "cache_position",
    "logits_to_keep",
    "num_items_in_batch",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "past_key_values",
    "position_ids",
    "return_dict",
    "use_cache",
})  # fmt: skip


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Writes an iteration's K/V to the pool and attends, each request to its own.

    Args:
        module: The attention module that calls.
        query: (1, num_heads, num_rows, head_dim).
        key: (1, num_kv_heads, num_rows, head_dim): of the iteration's tokens only.
        value: (1, num_kv_heads, num_rows, v_head_dim): likewise.
        attention_mask: None in an iteration: the batch says who sees what.
        dropout: Must be 0.
        scaling: Factor of the scores; head_dim ** -0.5 if None.
        sliding_window: A query sees that many tokens, itself included.
        softcap: Bound of the scores by tanh.
        s_aux: (num_heads,): attention sinks.
        is_causal: False is refused, as is a module's own `is_causal = False`.
        **kwargs: Refused, unless known to change nothing here.

    Returns:
        (1, num_rows, num_heads, v_head_dim), and no attention weights.

    Raises:
        UnsupportedError: An argument would change the result in a way that is not built here.
    """
    context = current_context()
    if context is None:
        options = {"sliding_window": sliding_window, "softcap": softcap, "s_aux": s_aux, "is_causal": is_causal}
        given = {name: option for name, option in options.items() if option is not None}
        return _user_attention(module)(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **given, **kwargs
        )
    output = attend(
        context,
        module,
        query,
        key,
        value,
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        dropout=dropout,
        sliding_window=sliding_window,
        chunk_size=judge(context, module, attention_mask, sliding_window, is_causal),
        softcap=softcap,
        sinks=s_aux,
        others=kwargs,
    )
    return output, None


def judge(
    context: AttentionContext,
    module: nn.Module,
    attention_mask: Tensor | None,
    sliding_window: int | None,
    is_causal: bool | None = None,
) -> int | None:
    """Look at what an attention module asks for besides its tensors, before `attend`.

    Returns:
        The chunk of positions that it attends within, as its config says; None if it sees all before it.

    Raises:
        UnsupportedError: It has a mask of its own, or is not causal.
    """
    if attention_mask is not None:
        raise UnsupportedError(f"{type(module).__name__} makes an attention mask of its own")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise UnsupportedError(f"{type(module).__name__} is not causal")
    chunk_size = _chunk_size(module)
    # The native cache keeps a chunk's worth of tokens where it would keep a window's.
    context.windows.add((module, sliding_window if chunk_size is None else chunk_size))
    return chunk_size


class AttentionOptions(TypedDict, total=False):
    """What attention is asked for besides its tensors.

    Attributes:
        scaling: Factor of the scores.
        dropout: Must be 0.
        sliding_window: A query sees that many tokens, itself included.
        chunk_size: A query sees its own chunk of that many positions.
        softcap: Bound of the scores by tanh.
        sinks: (num_heads,): attention sinks.
        alibi_slopes: (num_heads,): slope * (j - p) joins the score. The same tensor for all layers is fastest.
        others: Arguments that nobody has looked at: refused, unless known to change nothing here.
    """

    scaling: Required[float]
    dropout: float
    sliding_window: int | None
    chunk_size: int | None
    softcap: float | None
    sinks: Tensor | None
    alibi_slopes: Tensor | None
    others: Required[Mapping[str, Any]]


def attend(
    context: AttentionContext,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    **options: Unpack[AttentionOptions],
) -> Tensor:
    """The part of `attention_forward` that every attention module ends in, adapted ones too.

    Args:
        context: The iteration.
        module: As for `attention_forward`, like the arguments that follow.
        query: (1, num_heads, num_rows, head_dim).
        key: (1, num_kv_heads, num_rows, head_dim).
        value: (1, num_kv_heads, num_rows, v_head_dim).
        **options: See `AttentionOptions`.

    Returns:
        (1, num_rows, num_heads, v_head_dim).

    Raises:
        UnsupportedError: An argument would change the result in a way that is not built here.
    """
    if query.shape[0] != 1 or query.shape[2] != context.num_rows or key.shape[2] != context.num_rows:
        raise UnsupportedError(
            f"{type(module).__name__} reshapes its tokens: query {tuple(query.shape)}, key {tuple(key.shape)}"
        )
    query, key, value = (each[0, :, : context.batch.total_q].transpose(0, 1) for each in (query, key, value))
    output = attend_rows(context, module, query, key, value, **options)
    if padding := context.num_rows - len(output):
        output = torch.nn.functional.pad(output, (0, 0, 0, 0, 0, padding))
    return output[None]


def attend_rows(
    context: AttentionContext,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    chunk_size: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    others: Mapping[str, Any],
) -> Tensor:
    """`attend` on the batch's tokens as the kernels take them: query (total_q, num_heads, head_dim), K and V likewise.

    Returns:
        (total_q, num_heads, v_head_dim).

    Raises:
        UnsupportedError: An argument would change the result in a way that is not built here.
    """
    unknown = [name for name, option in others.items() if option is not None and name not in _HARMLESS]
    if unknown:
        raise UnsupportedError(f"{type(module).__name__} passes {', '.join(sorted(unknown))} to attention")
    if dropout:
        raise UnsupportedError(f"attention dropout is {dropout}")
    device = query.device
    if torch.is_autocast_enabled(device.type) and query.dtype is not torch.float64:
        # A rotary embedding widens Q and K again; natively autocast narrows all three at the attention's products.
        dtype = torch.get_autocast_dtype(device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if not query.dtype == key.dtype == value.dtype:
        raise UnsupportedError(f"query, key and value are {query.dtype}, {key.dtype} and {value.dtype}")
    call = context.calls.get(module, 0)
    context.calls[module] = call + 1
    cache = context.pool.layer(module, key, value, call)
    store_kv(key, value, cache.key, cache.value, context.batch_on(device))
    return selective_attention(
        query,
        cache.key,
        cache.value,
        context.batch_on(device, attends=True, chunk_size=chunk_size),
        scaling=scaling,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
    )


def attention_mask(*args: Any, config: PretrainedConfig, **kwargs: Any) -> Any:
    """No mask to look at in an iteration, and a note of the window asked for; elsewhere the user's own mask."""
    context = current_context()
    if context is None:
        return AttentionMaskInterface()[user_implementation(config)](*args, config=config, **kwargs)
    if kwargs.get("use_vmap"):
        raise UnsupportedError("it lays a mask of its own over the causal one")
    # Some models have masks made for all kinds of layers, whichever kinds they have.
    if kwargs.get("local_size") is not None and set(getattr(config, "layer_types", None) or ()) != {"full_attention"}:
        context.mask_windows.add(kwargs["local_size"])
    if context.tables is None:
        return None
    # Adapters look at no mask, but the models around them may: one of no size to speak of.
    return torch.zeros((1, 1, 1, 1), dtype=kwargs.get("dtype"), device=kwargs.get("device"))


def _chunk_size(module: Any) -> int | None:
    """The chunk of positions that `module` attends within, as its config says; None if it sees all before it."""
    layer_types = getattr(module.config, "layer_types", None)
    layer = getattr(module, "layer_idx", None)
    if layer_types is None or layer is None or layer_types[layer] != "chunked_attention":
        return None
    chunk_size: int = module.config.attention_chunk_size
    return chunk_size


def _user_attention(module: Any) -> Callable[..., Any]:
    eager: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    return AttentionInterface().get_interface(user_implementation(module.config), eager)


AttentionInterface.register(IMPLEMENTATION, attention_forward)
AttentionMaskInterface.register(IMPLEMENTATION, attention_mask)
