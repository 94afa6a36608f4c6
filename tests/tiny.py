"""Tiny random models, and prompts for them: small enough to run natively and by Orca a hundred times over."""

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

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
_PLAIN = {"scale_embedding": False, "tie_word_embeddings": False}
_FALCON = {**_COMMON, "ffn_hidden_size": 64}
_NEO = {**_COMMON, "num_layers": 2, "num_heads": 4, "window_size": 4, "attention_types": [[["global", "local"], 1]]}
_XGLM = {
    "d_model": 48,
    "tie_word_embeddings": False,
    "num_layers": 2,
    "attention_heads": 4,
    "ffn_dim": 64,
    "activation_function": "relu",
}

# Each architecture that Orca promises, at a tiny size; sliding windows are smaller than the prompts.
# Where one model type computes its attention in several ways, a name after a colon tells them apart.
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
    "stablelm": {**_GROUPED, "qk_layernorm": True, "partial_rotary_factor": 0.5},
    "biogpt": {**_COMMON, **_PLAIN},
    "gpt_bigcode": _GPT2,
    "codegen": {**_GPT2, "rotary_dim": 8},
    "gptj": {**_GPT2, "rotary_dim": 8},
    "nemotron": _GROUPED,
    "bloom": _COMMON,
    "bloom:odd": {**_COMMON, "num_attention_heads": 6, "apply_residual_connection_post_layernorm": True},
    "falcon:multi_query": {**_FALCON, "multi_query": True},
    "falcon:grouped": {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2},
    "falcon:alibi": {**_FALCON, "multi_query": False, "parallel_attn": False, "alibi": True, "bias": True},
    "falcon:alibi_grouped": {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "alibi": True},
    "gpt_neo": _NEO,
    "gpt_neox_japanese": {**_COMMON, "intermediate_multiple_size": 2},
    "mpt": {**_COMMON, "max_seq_len": 128},
    "mpt:options": {
        **_COMMON,
        "num_attention_heads": 6,
        "max_seq_len": 128,
        "attn_config": {"clip_qkv": 1.5, "softmax_scale": 0.2, "qk_ln": True},
    },
    "xglm": {**_COMMON, **_XGLM},
}

# Mixed lengths, for left padding.
PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15], [20, 21, 22], [30], [40, 41, 42, 43, 44, 45, 46], [50, 51, 52, 53]]


def make_model(model_type: str = "llama", seed: int = 0, **overrides: object) -> PreTrainedModel:
    """A random model in eval mode with weights large enough that its tokens vary."""
    config = AutoConfig.for_model(
        model_type.partition(":")[0], **{**ARCHITECTURES.get(model_type, _COMMON), **overrides}
    )
    torch.manual_seed(seed)
    return randomize(AutoModelForCausalLM.from_config(config).eval())


def randomize(model: PreTrainedModel) -> PreTrainedModel:
    """Gives `model` its random weights, and rows that end by length alone."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.25)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer for these models: the words w3 to w96 are the tokens of these numbers."""
    vocab = {"<pad>": 0, "<bos>": 1, "<eos>": 2, **{f"w{token}": token for token in range(3, VOCAB)}}
    words = Tokenizer(models.WordLevel(vocab, unk_token="w3"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "w3"}
    return PreTrainedTokenizerFast(tokenizer_object=words, padding_side="left", **special)


def pad_left(prompts: list[list[int]], pad: int = 0) -> dict[str, torch.Tensor]:
    """input_ids and attention_mask of (len(prompts), longest)."""
    width = max(map(len, prompts))
    return {
        "input_ids": torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts]),
        "attention_mask": torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]),
    }
