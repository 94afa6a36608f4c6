"""A tiny random model of every causal language model type of transformers."""

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

MODEL_TYPES = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))

# What a size of that name becomes, wherever it stands in a config or in the configs within.
_NAMES = {
    128: "max_position_embeddings n_positions max_seq_len context_length mamba_d_ssm lru_width",
    97: "vocab_size vocab_size_per_layer_input",
    64: "hidden_size d_model n_embd dim emb_dim embedding_dim embedding_size intermediate_size ffn_dim d_ff n_inner"
    " d_inner dff dim_ff decoder_ffn_dim encoder_ffn_dim ffn_hidden_size word_embed_proj_dim attention_hidden_size",
    32: "moe_intermediate_size intermediate_size_mlp expert_ffn_hidden_size shared_expert_intermediate_size"
    " mamba_d_head",
    24: "q_lora_rank",
    16: "head_dim kv_lora_rank qk_head_dim d_head d_kv dim_head mamba_chunk_size chunk_size mamba_d_state state_size"
    " linear_key_head_dim linear_value_head_dim linear_head_dim hidden_size_per_layer_input",
    12: "v_head_dim",
    8: "qk_rope_head_dim qk_nope_head_dim rotary_dim index_topk index_head_dim rel_extent image_size mamba_dt_rank"
    " attention_chunk_size",
    6: "sliding_window sliding_window_size",
    4: "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads attention_heads"
    " num_decoder_attention_heads num_encoder_attention_heads num_experts num_local_experts n_routed_experts"
    " mamba_n_heads linear_num_heads linear_num_value_heads index_n_heads num_attention_heads_per_layer patch_size",
    2: "num_key_value_heads kv_n_heads num_experts_per_tok num_experts_per_token moe_topk encoder_layers decoder_layers"
    " num_encoder_layers num_decoder_layers depth linear_num_key_heads",
    1: "n_group num_expert_group topk_group first_k_dense_replace",
}  # fmt: skip
_SIZES = {name: size for size, names in _NAMES.items() for name in names.split()}
_DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def _shrink(config: dict[str, Any]) -> dict[str, Any]:
    """`config` with small sizes, and a layer of each kind that it has, but two layers at least."""
    depth_name = next((name for name in _DEPTHS if isinstance(config.get(name), int)), "")
    layers = _one_of_each_kind(config, config.get(depth_name, 0))
    small = dict(config)
    for name, value in config.items():
        if isinstance(value, dict) and name != "per_layer_config":
            small[name] = _shrink(value)
        elif name in _TOKENS:
            small[name] = _TOKENS[name]
        elif name == depth_name and value:
            small[name] = len(layers)
        elif _is_per_layer(value, config.get(depth_name, 0)):
            small[name] = [_SIZES.get(name, value[layer]) for layer in layers]
        elif name in _SIZES and isinstance(value, int) and value > 1:
            small[name] = _SIZES[name]
    if "qk_rope_head_dim" in config:  # latent attention, in which heads share what is cached
        small["head_dim"] = small["qk_rope_head_dim"]
        small["num_key_value_heads"] = small["num_attention_heads"]
    if "per_layer_config" in config:
        small["per_layer_config"] = {
            str(layers.index(int(layer))): {name: small[name] * own // config[name] for name, own in special.items()}
            for layer, special in config["per_layer_config"].items()
            if int(layer) in layers
        }
    return small


def _is_per_layer(value: object, depth: int) -> bool:
    return isinstance(value, list) and len(value) == depth > 2 and value != list(range(depth))


def _one_of_each_kind(config: dict[str, Any], depth: int) -> list[int]:
    per_layer = [value for value in config.values() if _is_per_layer(value, depth)]
    special = config.get("per_layer_config", {})
    kinds: dict[str, int] = {}
    for layer in range(depth):
        kinds.setdefault(str(([value[layer] for value in per_layer], special.get(f"{layer:02}"))), layer)
    return sorted(kinds.values()) if len(kinds) > 1 else list(range(min(depth, 2)))


_MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
_MIXED_ROPE = {kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in _MIXED["layer_types"]}
_NO_EXTRA_EMBEDDINGS = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
_ASSISTANT = {"text_config": {"num_kv_shared_layers": 2}, "backbone_hidden_size": 64, "num_centroids": 8}
_GEMMA3N = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "intermediate_size": [64] * 4,
    "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    "laurel_rank": 8,
}
_DOTS3 = {
    "head_dim": 20,
    "rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.4}
        for kind in ("sliding_attention", "indexed_attention")
    },
}
_INDEXER = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
    "hc_lowrank": 8,
}
_INKLING = {
    "unpadded_vocab_size": 97,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    "d_rel": 8,
    "log_scaling_n_floor": 8,
}

# What a type needs beside small sizes: to be built at all, to be small, to have all of its kinds of layers.
_OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "blt": {
        "encoder_hash_byte_group_vocab": 32,
        "encoder_config": {"hidden_size_global": 64},
        "decoder_config": {"hidden_size_global": 64},
    },
    "cohere_compass_text": {**_MIXED, "rope_parameters": _MIXED_ROPE},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "dory": {
        "num_hidden_layers": 3,
        "n_input_layers": 1,
        "n_recurrent_layers": 1,
        "n_output_layers": 1,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    },
    "dots1": {**_MIXED, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note": {
        "text_config": _DOTS3,
        "vision_config": {"adapter_in_dim": 64, "adapter_out_dim": 64},
        "audio_config": {"adapter_input_size": 64, "adapter_out_dim": 64},
    },
    "dots3_note_text": _DOTS3,
    "gemma3n": {"text_config": _GEMMA3N},
    "gemma3n_text": _GEMMA3N,
    "gemma4_assistant": _ASSISTANT,
    "gemma4_unified_assistant": _ASSISTANT,
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"], "shared_intermediate_size": 32},
    "hrm_text": {"num_hidden_layers": 16, "num_layers_per_stack": 2},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "inkling_text": _INKLING,
    "inkling2_text": _INKLING,
    "inkling2_loop_text": _INKLING,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "laguna": _MIXED,
    "lfm2": {"layer_types": ["conv", "full_attention"], "full_attn_idxs": [1]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {"zero_expert_num": 2},
    "mamba2": {"num_heads": 8, "n_groups": 2},
    "marian": {"decoder_vocab_size": 97},
    "mellum": _MIXED,
    "ministral": {**_MIXED, "head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h": {
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
        "moe_shared_expert_intermediate_size": 32,
    },
    "phi4_multimodal": {
        "audio_config": {
            "num_blocks": 1,
            "ext_pw_out_channel": 64,
            "depthwise_separable_out_channel": 64,
            "nemo_conv_channels": 8,
        },
        "vision_config": {"crop_size": 8},
    },
    "qwen2": {**_MIXED, "use_sliding_window": True},
    "qwen3": {**_MIXED, "use_sliding_window": True},
    "qwen4_exp": {"text_config": _INDEXER},
    "qwen4_exp_text": _INDEXER,
    "recurrent_gemma": {"num_hidden_layers": 3, "attention_window_size": 6},
    "reformer": {
        "axial_pos_embds_dim": [16, 48],
        "axial_pos_shape": [8, 16],
        "feed_forward_size": 64,
        "attention_head_size": 16,
    },
    "roc_bert": {
        "pronunciation_embed_dim": 16,
        "pronunciation_vocab_size": 32,
        "shape_embed_dim": 16,
        "shape_vocab_size": 32,
    },
    "smollm3": {**_MIXED, "use_sliding_window": True},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128, "num_blocks": 2},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"attention_hidden_size": 128, "attention_head_dim": 32},
    "zamba2": {
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "mamba_headdim": 32,
        "n_mamba_heads": 4,
        "hybrid_layer_ids": [1],
    },
}
# Whose default configuration does not pass the type's own validation: what it takes to get one.
_BASES: dict[str, dict[str, Any]] = {
    "gemma4_assistant": {"text_config": {"model_type": "gemma4_text", **_NO_EXTRA_EMBEDDINGS}},
}
# A vision tower that does not need a package of its own, for types whose own does: no image is ever shown to it.
_TOWERS = {"gemma3n": "aimv2_vision_model"}
# Types of a whole whose causal language model is made from a part's configuration.
_PARTS = {"musicgen": "decoder", "musicgen_melody": "decoder"}
# Weights' standard deviation where the usual one makes a model repeat itself.
_DEVIATIONS = {"roformer": 0.5}


def _merge(config: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(config)
    for name, value in overrides.items():
        old = merged.get(name)
        merged[name] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) and old else value
    return merged


def make_tiny(model_type: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A model of `model_type` in eval mode, whose tokens vary; sliding windows are shorter than tiny.PROMPTS[0]."""
    config_class = CONFIG_MAPPING[model_type]
    small = _shrink(config_class(**_BASES.get(model_type, {})).to_dict())
    small |= {"tie_word_embeddings": False, **({"is_decoder": True} if "is_decoder" in small else {})}
    config = config_class.from_dict(_merge(_merge(small, _OVERRIDES.get(model_type, {})), overrides))
    if model_type in _TOWERS:
        tower = CONFIG_MAPPING[_TOWERS[model_type]]
        config.__dict__["vision_config"] = tower.from_dict(  # past validation
            {**small["vision_config"], **_shrink(tower().to_dict())}
        )
    torch.manual_seed(seed)
    if model_type in _PARTS:
        model_class = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
        model = model_class(getattr(config, _PARTS[model_type])).eval()
    else:
        model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, _DEVIATIONS.get(model_type, 0.2))
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model
