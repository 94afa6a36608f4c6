"""Adapters: attention modules that do not call transformers' attention interface, made to end in Orca's attention.

An adapter stands in for one attention class's forward while an iteration runs. It makes queries, keys and values by the
module's own projections, exactly as that forward does, and hands them to `attention.attend`. Classes are known by name,
so that no modeling file is imported for it; a subclass may compute something else, and is not known.
"""

import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from orca_hf.attention import attend
from orca_hf.attention_context import AttentionContext, current_context
from orca_hf.attention_name import user_implementation
from orca_hf.errors import UnsupportedError
from orca_hf.patches import StandIn


@dataclass(frozen=True, slots=True)
class Adapter:
    """How one attention class is run.

    Attributes:
        forward: Takes (module, context) and what the module's forward takes; returns what that does.
        takes_positions: The model needs position_ids; otherwise its positions are all in its attention (ALiBi).
        native_kv: From K and V as the pool has them, (num, num_kv_heads, dim), to those of the native cache; None if
            they are the same.
    """

    forward: Callable[..., Any]
    takes_positions: bool = True
    native_kv: Callable[[Any, Tensor, Tensor], tuple[Tensor, Tensor]] | None = None


class AdaptedForward(StandIn):
    """An adapter at work in one attention module; without an iteration, the module's own forward."""

    __slots__ = ("adapter",)

    optional = False

    def __init__(self, module: nn.Module, adapter: Adapter) -> None:
        super().__init__(module)
        self.adapter = adapter

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The adapter's forward in this thread's iteration, if it runs one."""
        context = current_context()
        if context is None:
            return super().__call__(*args, **kwargs)
        # Where one of these classes looks back over a window, its native cache does not.
        context.windows.add((self.module, None))
        return self.adapter.forward(self.module, context, *args, **kwargs)


def find_adapter(module: nn.Module) -> Adapter | None:
    """The adapter for exactly the class of `module`, unless that class's forward has been replaced."""
    kind = type(module)
    adapter = ADAPTERS.get(f"{kind.__module__}.{kind.__qualname__}")
    if adapter is None:
        return None
    where = (getattr(kind.forward, "__module__", None), getattr(kind.forward, "__qualname__", None))
    return adapter if where == (kind.__module__, f"{kind.__qualname__}.forward") else None


def adapt(modules: Iterable[nn.Module]) -> list[AdaptedForward]:
    """A stand-in for the forward of each of a model's `modules` that there is an adapter for."""
    found = ((module, find_adapter(module)) for module in modules)
    return [AdaptedForward(module, adapter) for module, adapter in found if adapter is not None]


def native_kv(module: nn.Module, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """K and V of `module`, (num, num_kv_heads, dim) each, as the model's native cache has them."""
    adapter = find_adapter(module)
    return (key, value) if adapter is None or adapter.native_kv is None else adapter.native_kv(module, key, value)


def _table(context: AttentionContext, name: tuple[Any, ...], make: Callable[[], Tensor]) -> Tensor:
    """A tensor that the layers share and that stays the same from iteration to iteration."""
    assert context.tables is not None, "adapters run in iterations that were given tables"
    found = context.tables.get(name)
    if found is None:
        found = context.tables[name] = make()
    return found


def _slopes(module: Any, context: AttentionContext, device: torch.device) -> Tensor:
    """(num_heads,) float32: the ALiBi slopes of bloom and falcon, from the function that the model takes them from."""

    def make() -> Tensor:
        build = sys.modules[type(module).__module__].build_alibi_tensor
        mask = torch.ones(1, 2, dtype=torch.int64, device=device)
        return build(mask, module.num_heads, torch.float32)[:, 0, 1].contiguous()

    return _table(context, (type(module), module.num_heads, device), make)


def _bloom(
    module: Any,
    context: AttentionContext,
    hidden_states: Tensor,
    residual: Tensor,
    alibi: Tensor,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    if module.pretraining_tp > 1 and module.slow_but_exact:
        raise UnsupportedError("slow_but_exact adds up its output in another order")
    if hidden_states.dtype in (torch.bfloat16, torch.float16) or torch.is_autocast_enabled(hidden_states.device.type):
        # Its scores, slope * j included, are in that dtype: at 900 tokens, 1.9 of difference to a logit in bfloat16.
        raise UnsupportedError("natively its position bias is rounded in half precision, the more the longer a row is")
    query, key, value = module._reshape(module.query_key_value(hidden_states))
    slopes = _slopes(module, context, query.device)
    output = attend(
        context,
        module,
        query,
        key,
        value,
        scaling=module.inv_norm_factor,
        dropout=module.attention_dropout.p if module.training else 0.0,
        alibi_slopes=slopes if module.beta == 1 else slopes * module.beta,
        others=kwargs,
    )
    output = module.dense(output.flatten(2))
    return residual + nn.functional.dropout(output, p=module.hidden_dropout, training=module.training), None


def _mpt(
    module: Any,
    context: AttentionContext,
    hidden_states: Tensor,
    position_bias: Tensor | None = None,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    mixed = module.Wqkv(hidden_states)
    if module.clip_qkv:
        mixed = mixed.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    query, key, value = mixed.unflatten(2, (3, module.n_heads, module.head_dim)).permute(2, 0, 3, 1, 4).unbind(0)
    slopes = None
    if position_bias is not None:
        # slope * (j - p) for the last query: its last key but one is one token away.
        bias: Tensor = position_bias
        slopes = _table(context, ("mpt", module.n_heads, bias.device), lambda: -bias[:, 0, -2])
    output = attend(
        context,
        module,
        query,
        key,
        value,
        scaling=module.softmax_scale,
        dropout=module.attn_dropout_p if module.training else 0.0,
        alibi_slopes=slopes,
        others=kwargs,
    )
    return module.out_proj(output.flatten(2)), None


def _falcon(
    module: Any,
    context: AttentionContext,
    hidden_states: Tensor,
    alibi: Tensor | None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    heads, dim = module.num_heads, module.head_dim
    fused = module.query_key_value(hidden_states)
    if module.new_decoder_architecture:
        # The native forward repeats a group's K and V over its heads; here they are kept once.
        grouped = fused.unflatten(2, (-1, heads // module.num_kv_heads + 2, dim))
        query, key, value = grouped[..., :-2, :].flatten(2, 3), grouped[..., -2, :], grouped[..., -1, :]
    else:
        query, key, value = module._split_heads(fused)
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    scaling = 1.0 / math.sqrt(dim)
    if alibi is None:
        cos, sin = position_embeddings  # type: ignore[misc]
        rotate = sys.modules[type(module).__module__].apply_rotary_pos_emb
        query, key = rotate(query, key, cos, sin)
        dropout = 0.0  # natively there is none either, not even in training
    else:
        assert position_ids is not None
        # Of the mask, to which natively the model has added it; eager adds it to the scores as well.
        config = module.config
        times = 1.0 / math.sqrt(config.hidden_size // config.num_attention_heads)
        if user_implementation(config) == "sdpa":
            times /= scaling
        else:
            scaling = module.inv_norm_factor
            times = 1 + times / scaling
        bias = _falcon_bias(module, context, position_ids, key.dtype) * times
        groups = heads // key.shape[1]
        key = torch.cat((key.repeat_interleave(groups, dim=1), bias), dim=-1)
        # As wide as K: on the CPU, attention is faster so, and keeps its scores in fp32.
        value = nn.functional.pad(value.repeat_interleave(groups, dim=1), (0, 1))
        query = nn.functional.pad(query, (0, 1), value=1.0)
        dropout = module.attention_dropout.p if module.training else 0.0
    output = attend(context, module, query, key, value, scaling=scaling, dropout=dropout, others=kwargs)
    return module.dense(output[..., :dim].flatten(2)), None


def _falcon_bias(module: Any, context: AttentionContext, position_ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Falcon's ALiBi of each key: (1, num_heads, total_q, 1).

    Natively slope * j is rounded to bfloat16 whatever the model's dtype, by up to 0.4%: far from position 0 that is
    more than the step from one key to the next. So the bias cannot be had from slopes and j - p. It is a number that a
    key has, and goes with it: as one more dimension of K, in which each query has a 1.
    """
    slopes = _slopes(module, context, position_ids.device).bfloat16()
    return (slopes[:, None] * position_ids).to(dtype)[None, :, :, None]


def _falcon_kv(module: Any, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    key, value = key[..., : module.head_dim], value[..., : module.head_dim]
    heads = module.num_heads if module.new_decoder_architecture else module.num_kv_heads
    if key.shape[1] < heads:
        groups = heads // key.shape[1]
        return key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    return key[:, :heads], value[:, :heads]


def _gpt_neo(
    module: Any, context: AttentionContext, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
) -> tuple[Tensor, None]:
    projected = (module.q_proj(hidden_states), module.k_proj(hidden_states), module.v_proj(hidden_states))
    query, key, value = (module._split_heads(each, module.num_heads, module.head_dim) for each in projected)
    output = attend(
        context,
        module,
        query,
        key,
        value,
        scaling=1.0,
        dropout=module.attn_dropout.p if module.training else 0.0,
        sliding_window=module.config.window_size if module.attention_type == "local" else None,
        others=kwargs,
    )
    return module.resid_dropout(module.out_proj(output.flatten(2))), None


def _gpt_neox_japanese(
    module: Any,
    context: AttentionContext,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None, Tensor | None]:
    size, rotary = module.head_size, module.rotary_ndims
    mixed = module.query_key_value(hidden_states).unflatten(2, (module.num_attention_heads, 3 * size)).transpose(1, 2)
    query, key, value = mixed.split(size, dim=-1)
    cos, sin = position_embeddings  # type: ignore[misc]
    rotate = sys.modules[type(module).__module__].apply_rotary_pos_emb
    turned = rotate(query[..., :rotary], key[..., :rotary], cos, sin)
    query, key = (torch.cat((new, old[..., rotary:]), -1) for new, old in zip(turned, (query, key), strict=True))
    output = attend(
        context,
        module,
        query,
        key,
        value,
        scaling=1.0 / module.norm_factor,
        dropout=module.attention_dropout.p if module.training else 0.0,
        others=kwargs,
    )
    return module.dense(output.flatten(2)), None, module.dense_bias


def _xglm(
    module: Any,
    context: AttentionContext,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    projected = (module.q_proj(hidden_states) * module.scaling, module.k_proj(hidden_states))
    query, key, value = (
        each.unflatten(2, (module.num_heads, module.head_dim)).transpose(1, 2)
        for each in (*projected, module.v_proj(hidden_states))
    )
    output = attend(
        context,
        module,
        query,
        key,
        value,
        scaling=1.0,
        dropout=module.dropout if module.training else 0.0,
        others=kwargs,
    )
    return module.out_proj(output.flatten(2)), None


_MODELS = "transformers.models."
# By the attention class's dotted name.
ADAPTERS = {
    _MODELS + "bloom.modeling_bloom.BloomAttention": Adapter(_bloom, takes_positions=False),
    _MODELS + "falcon.modeling_falcon.FalconAttention": Adapter(_falcon, native_kv=_falcon_kv),
    _MODELS + "gpt_neo.modeling_gpt_neo.GPTNeoSelfAttention": Adapter(_gpt_neo),
    _MODELS + "gpt_neox_japanese.modeling_gpt_neox_japanese.GPTNeoXJapaneseAttention": Adapter(_gpt_neox_japanese),
    _MODELS + "mpt.modeling_mpt.MptAttention": Adapter(_mpt, takes_positions=False),
    _MODELS + "xglm.modeling_xglm.XGLMAttention": Adapter(_xglm),
}
