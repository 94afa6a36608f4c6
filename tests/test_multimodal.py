"""Promise: a multimodal model's text-only calls run by Orca and equal native; calls with an image go native."""

import pytest
import torch
from tiny import PROMPTS, VOCAB, pad_left, randomize
from transformers import AutoConfig, AutoModelForImageTextToText

import orca_hf
from orca_hf import OrcaConfig

IMAGE = 90
TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
QWEN_VISION = {"depth": 1, "num_heads": 2, "patch_size": 14}
QWEN = {"image_token_id": IMAGE, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
# Rotary positions in three dimensions, all the same for text.
MROPE = {"rope_type": "default", "mrope_section": [2, 2, 2], "rope_theta": 1e4}

MODELS = {
    "gemma3": {
        "text_config": {
            **TEXT,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "vision_config": VISION,
        "image_token_id": IMAGE,
        "mm_tokens_per_image": 4,
    },
    "llava": {
        "text_config": {**TEXT, "model_type": "llama"},
        "vision_config": {**VISION, "model_type": "clip_vision_model"},
        "image_token_index": IMAGE,
    },
    "mistral3": {
        "text_config": {**TEXT, "model_type": "mistral", "sliding_window": 6},
        "vision_config": {**VISION, "model_type": "pixtral"},
        "image_token_index": IMAGE,
    },
    "qwen2_vl": {
        "text_config": {**TEXT, "rope_parameters": MROPE},
        "vision_config": {**QWEN_VISION, "embed_dim": 32, "hidden_size": 48},
        **QWEN,
    },
    "qwen3_vl": {
        "text_config": {**TEXT, "head_dim": 12, "rope_parameters": MROPE},
        "vision_config": {
            **QWEN_VISION,
            "hidden_size": 32,
            "out_hidden_size": 48,
            "intermediate_size": 32,
            "deepstack_visual_indexes": [0],
            "num_position_embeddings": 16,
        },
        **QWEN,
    },
}  # fmt: skip


def make_multimodal(model_type):
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **MODELS[model_type])
    return randomize(AutoModelForImageTextToText.from_config(config).eval())


@pytest.mark.parametrize("model_type", MODELS)
def test_text_equals_native(model_type):
    model = make_multimodal(model_type)
    options = {"max_new_tokens": 12, "do_sample": False}
    calls = [pad_left(PROMPTS), pad_left(PROMPTS[1:3]), {"input_ids": torch.tensor([PROMPTS[0]])}]
    native = [model.generate(**call, **options) for call in calls]
    assert len(set(native[0][:, -12:].flatten().tolist())) > 4
    orca_hf.wrap(model, OrcaConfig(max_batch_size=3, max_batch_tokens=5, max_slots=256, block_size=4))
    for call, expected in zip(calls, native, strict=True):
        assert orca_hf.explain(model, **call, **options).runs_by == "orca"
        assert torch.equal(model.generate(**call, **options), expected)


def test_an_image_goes_native():
    model = make_multimodal("llava")
    ids = torch.tensor([[5, 6, *[IMAGE] * 4, 7]])
    made = {"input_ids": ids, "pixel_values": torch.randn(1, 3, 28, 28), "max_new_tokens": 6, "do_sample": False}
    made["vision_feature_select_strategy"] = "default"
    native = model.generate(**made)
    orca_hf.wrap(model)
    assert torch.equal(model.generate(**made), native)
    assert "pixel_values" in str(orca_hf.explain(model, **made))


def test_token_types_that_mark_no_image_are_text():
    """A processor gives them with any text; where they mark an image, its tokens see each other."""
    model = make_multimodal("gemma3")
    batch = {**pad_left(PROMPTS), "max_new_tokens": 8, "do_sample": False}
    types = torch.zeros_like(batch["input_ids"])
    image = types.clone()
    image[:, -3:-1] = 1
    native = [model.generate(**batch, token_type_ids=each) for each in (types, image)]
    orca_hf.wrap(model)
    for each, expected, runs_by in zip((types, image), native, ("orca", "native"), strict=True):
        assert torch.equal(model.generate(**batch, token_type_ids=each), expected)
        assert orca_hf.explain(model, **batch, token_type_ids=each).runs_by == runs_by
