"""Tiny random models, and prompts for them: small enough to run natively and by Orca a hundred times over."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB = 97

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GROUPED = {**_COMMON, "num_key_value_heads": 2}
_HEADED = {**_GROUPED, "head_dim": 16}
_GPT2 = {
    "vocab_size": VOCAB,
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GEMMA = {**_HEADED, "query_pre_attn_scalar": 16, "sliding_window": 6, "tie_word_embeddings": False}
_MOE = {**_HEADED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

# Each architecture that Orca promises, at a tiny size; sliding windows are smaller than the prompts.
ARCHITECTURES = {
    "llama": _GROUPED,
    "mistral": {**_GROUPED, "sliding_window": 6},
    "qwen2": _GROUPED,
    "qwen3": _HEADED,
    "gemma": _HEADED,
    "gemma2": {**_GEMMA, "attn_logit_softcapping": 2.0},
    "gemma3_text": {
        **_GEMMA,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "phi3": {**_GROUPED, "sliding_window": 6},
    "gpt2": _GPT2,
    "gpt_neox": _COMMON,
    "opt": {**_COMMON, "ffn_dim": 64, "word_embed_proj_dim": 48},
    "olmo2": _GROUPED,
    "granite": _GROUPED,
    "mixtral": {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6},
    "qwen3_moe": _MOE,
}

# Mixed lengths, for left padding.
PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15], [20, 21, 22], [30], [40, 41, 42, 43, 44, 45, 46], [50, 51, 52, 53]]


def make_model(model_type: str = "llama", seed: int = 0, **overrides: object) -> PreTrainedModel:
    """A random model in eval mode with weights large enough that its tokens vary."""
    config = AutoConfig.for_model(model_type, **{**ARCHITECTURES.get(model_type, _COMMON), **overrides})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.25)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def pad_left(prompts: list[list[int]], pad: int = 0) -> dict[str, torch.Tensor]:
    """input_ids and attention_mask of (len(prompts), longest)."""
    width = max(map(len, prompts))
    return {
        "input_ids": torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts]),
        "attention_mask": torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]),
    }
