"""Promise: bitsandbytes' 4-bit weights run by Orca to native's tokens; LLM.int8() natively."""

import bitsandbytes
import pytest
import torch
from tiny import PROMPTS, make_model, pad_left
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import orca_hf
from orca_hf import OrcaConfig

BATCH = {**pad_left(PROMPTS), "max_new_tokens": 10, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
LOADED = {
    "nf4": (
        {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32},
        torch.float32, bitsandbytes.nn.Linear4bit, "",
    ),
    # In bf16 the trial iteration alone would let this one pass.
    "int8": ({"load_in_8bit": True}, torch.bfloat16, bitsandbytes.nn.Linear8bitLt, "outliers in all rows together"),
    "int8 without outliers": (
        {"load_in_8bit": True, "llm_int8_threshold": 0.0},
        torch.float32, bitsandbytes.nn.Linear8bitLt, "where a last bit can move a token",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LOADED)
def test_a_model_loaded_with_bitsandbytes(tmp_path, name):
    settings, dtype, kind, reason = LOADED[name]
    make_model(hidden_size=64, intermediate_size=128).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=BitsAndBytesConfig(**settings), dtype=dtype, device_map={"": "cpu"}
    )
    assert isinstance(model.model.layers[0].mlp.up_proj, kind)
    native = model.generate(**BATCH)
    orca_hf.wrap(model, OrcaConfig(max_slots=512))
    assert torch.equal(model.generate(**BATCH), native)
    explanation = orca_hf.explain(model)
    assert explanation.runs_by == ("native" if reason else "orca")
    assert reason in str(explanation)
