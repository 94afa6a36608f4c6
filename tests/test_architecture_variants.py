"""Promise: what a config may vary within an architecture runs by Orca and equals native, in every dtype that it can."""

import pytest
import torch
from tiny import PROMPTS, make_model, pad_left

import orca_hf
from orca_hf import OrcaConfig

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 1e4,
}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 6, "long_factor": [4.0] * 6, "rope_theta": 1e4}
MLA = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}

VARIANTS = {
    "tied embeddings": ("llama", {"tie_word_embeddings": True}),
    "linear rope": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
    "dynamic rope": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}),
    "yarn rope": ("llama", {"rope_parameters": YARN}),
    "llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "longrope": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64}),
    "partial rope": ("gpt_neox", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "rotary_pct": 0.25}),
    "layers without rope": ("smollm3", {"num_key_value_heads": 2, "no_rope_layers": [1, 0]}),
    "one key/value head": ("llama", {"num_key_value_heads": 1}),
    "wide heads": ("llama", {"head_dim": 32}),
    "attention biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "K and V of different width": ("deepseek_v3", MLA),
    "head counts per layer": (
        "mimo_v2_flash",
        {
            "num_key_value_heads": 2,
            "head_dim": 16,
            "v_head_dim": 12,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 4,
            "swa_head_dim": 16,
            "swa_v_head_dim": 12,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
        },
    ),
    "sinks": (
        "gpt_oss",
        {
            "num_key_value_heads": 2,
            "head_dim": 16,
            "sliding_window": 6,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "layers that share K and V": (
        "gemma3n_text",
        {
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 97,
            "laurel_rank": 4,
            "activation_sparsity_pattern": None,
        },
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_equals_native(name):
    model_type, overrides = VARIANTS[name]
    model = make_model(model_type, **overrides)
    batch = {**pad_left(PROMPTS), "max_new_tokens": 16, "do_sample": False}
    native = model.generate(**batch)
    assert len(set(native[:, -16:].flatten().tolist())) > 4, "the model repeats itself: too weak an oracle"
    orca_hf.wrap(model, OrcaConfig(max_batch_size=3, max_batch_tokens=5, max_slots=256, block_size=4))
    assert orca_hf.explain(model, **batch).runs_by == "orca"
    assert torch.equal(model.generate(**batch), native)


# PyTorch's product for experts does not take float64.
NOT_IN_FLOAT64 = {"K and V of different width", "head counts per layer", "sinks"}
IN_DTYPES = [(name, dtype) for name in VARIANTS for dtype in (torch.bfloat16, torch.float16)]
IN_DTYPES += [(name, torch.float64) for name in VARIANTS if name not in NOT_IN_FLOAT64]


@pytest.mark.parametrize(("name", "dtype"), IN_DTYPES, ids=str)
def test_a_variant_runs_in_other_dtypes(name, dtype):
    """Rounding differs with a batch's shape, natively too: a row may part from native at a near tie, and only there."""
    model_type, overrides = VARIANTS[name]
    model = make_model(model_type, **overrides).to(dtype)
    made = {**pad_left(PROMPTS), "max_new_tokens": 6, "return_dict_in_generate": True, "output_logits": True}
    made["use_cache"] = False  # what latent attention caches, Orca cannot return
    native = model.generate(**made, do_sample=False)
    orca_hf.wrap(model, OrcaConfig(max_batch_size=3, max_batch_tokens=5, max_slots=256, block_size=4))
    assert orca_hf.explain(model, **made).runs_by == "orca"
    ours = model.generate(**made, do_sample=False)
    eps = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)  # models compute some things in float32
    for row in range(len(PROMPTS)):
        for step in range(6):
            top, next_best = native.logits[step][row].topk(2).values.tolist()
            if ours.sequences[row, step - 6] != native.sequences[row, step - 6]:
                assert top - next_best <= 64 * eps * abs(top), (row, step)
                break
            difference = (ours.logits[step][row] - native.logits[step][row]).abs().max().item()
            assert difference <= 64 * eps * max(1.0, native.logits[step][row].abs().max().item())
