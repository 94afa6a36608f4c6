"""Promise: quantised weights run by Orca to native's tokens; quantised activations natively where these would vary."""

import gguf
import pytest
import torch
from tiny import PROMPTS, make_model, pad_left
from torch import nn
from torchao.quantization import (
    Float8WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8DynamicActivationIntxWeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    PerGroup,
    PerRow,
    PerTensor,
    quantize_,
)
from transformers import AutoModelForCausalLM, GgufConfig, TorchAoConfig

import orca_hf
from orca_hf import OrcaConfig

BATCH = {**pad_left(PROMPTS), "max_new_tokens": 10, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
# Sizes that the kernels of all packages take.
SIZES = {"hidden_size": 64, "intermediate_size": 128}
CONFIG = OrcaConfig(max_slots=512)


def native_and_ours(model):
    native = model.generate(**BATCH)
    orca_hf.wrap(model, CONFIG)
    assert torch.equal(model.generate(**BATCH), native)
    return orca_hf.explain(model)


WEIGHTS_ONLY = {
    "int8": Int8WeightOnlyConfig(),
    "int4": IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(16)),
    "float8": Float8WeightOnlyConfig(),
}


@pytest.mark.parametrize("name", WEIGHTS_ONLY)
def test_torchao_weights_run_by_orca_and_are_not_packed(name):
    model = make_model(**SIZES)
    plain = model.generate(**BATCH)
    quantize_(model, WEIGHTS_ONLY[name])
    assert not torch.equal(model.generate(**BATCH), plain), "the weights are others now"
    explanation = native_and_ours(model)
    assert explanation.runs_by == "orca"
    assert explanation.engines[0].packed_bytes == 0


def test_weights_quantised_after_wrapping_are_seen():
    model = orca_hf.wrap(make_model(**SIZES), CONFIG)
    before = model.generate(**BATCH)
    model.generate(**BATCH)
    assert model.generate.engines[0].stats.packed_bytes > 0
    quantize_(model, Int8WeightOnlyConfig())
    native = quantize_(twin := make_model(**SIZES), Int8WeightOnlyConfig()) or twin.generate(**BATCH)
    assert not torch.equal(native, before)
    assert torch.equal(model.generate(**BATCH), native)
    assert orca_hf.explain(model).runs_by == "orca"
    assert model.generate.engines[0].stats.packed_bytes == 0


ONE_SCALE = "one scale for all rows"
EACH_TOKEN = "where a last bit can move a token"
ACTIVATIONS = {
    # In bf16 the trial iteration alone would let this one pass, and its tokens would be its neighbours' affair.
    "per tensor, bf16": (Int8DynamicActivationInt8WeightConfig(granularity=PerTensor()), torch.bfloat16, ONE_SCALE),
    "per tensor": (Int8DynamicActivationInt8WeightConfig(granularity=PerTensor()), torch.float32, ONE_SCALE),
    "per token": (Int8DynamicActivationInt8WeightConfig(granularity=PerRow()), torch.float32, EACH_TOKEN),
    "per token, int4": (
        Int8DynamicActivationIntxWeightConfig(weight_granularity=PerGroup(16)), torch.float32, EACH_TOKEN,
    ),
}  # fmt: skip


@pytest.mark.parametrize("when", ["before the first call", "after it"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_quantised_activations_run_natively(name, when):
    config, dtype, reason = ACTIVATIONS[name]
    model = make_model(**SIZES).to(dtype)
    orca_hf.wrap(model, CONFIG)
    if when == "after it":
        model.generate(**BATCH)
    quantize_(model, config)
    native = type(model).generate(model, **BATCH)
    assert torch.equal(model.generate(**BATCH), native)
    assert reason in str(orca_hf.explain(model))


def test_native_itself_lets_neighbours_change_a_row_where_one_scale_serves_all():
    """Why per-tensor activations cannot be Orca's: there is no answer to a row but that of one certain batch."""
    model = make_model(**SIZES)
    quantize_(model, Int8DynamicActivationInt8WeightConfig(granularity=PerTensor()))
    together = model.generate(**BATCH)[:, -10:]
    alone = [
        model.generate(torch.tensor([prompt]), max_new_tokens=10, do_sample=False)[0, -10:].tolist()
        for prompt in PROMPTS
    ]
    assert together.tolist() != alone


def test_activations_quantised_by_token_run_by_orca_in_bf16():
    model = make_model(**SIZES).to(torch.bfloat16)
    quantize_(model, Int8DynamicActivationInt8WeightConfig(granularity=PerRow()))
    prompt = {"inputs": torch.tensor([PROMPTS[0]]), "max_new_tokens": 8, "do_sample": False}
    native = model.generate(**prompt)
    orca_hf.wrap(model, CONFIG)
    assert model.generate(**prompt).shape == native.shape
    assert orca_hf.explain(model).runs_by == "orca"


def test_a_model_loaded_with_torchao_runs_by_orca(tmp_path):
    make_model(**SIZES).save_pretrained(tmp_path)
    quantization = TorchAoConfig(Int8WeightOnlyConfig())
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=quantization, device_map={"": "cpu"})
    assert type(model.model.layers[0].mlp.up_proj.weight) is not nn.Parameter
    assert native_and_ours(model).runs_by == "orca"


_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_gguf(model, path):
    """`model`, a llama, with its matrices in Q8_0."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    for name, tensor in model.state_dict().items():
        name = name.removesuffix(".weight")
        if name.startswith("model.layers."):
            layer, part = name.removeprefix("model.layers.").split(".", 1)
            name = f"blk.{layer}.{_GGUF_NAMES[part]}.weight"
        else:
            name = f"{_GGUF_NAMES[name]}.weight"
        kind = gguf.GGMLQuantizationType.Q8_0 if tensor.dim() == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(tensor.numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("dequantize", [True, False])
def test_gguf_weights_run_by_orca(tmp_path, dequantize):
    """On the CPU transformers unpacks them in either case: the kernels that read blocks are for other devices."""
    write_gguf(make_model(**SIZES), tmp_path / "model.gguf")
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", quantization_config=GgufConfig(dequantize=dequantize), dtype=torch.float32
    )
    assert type(model.model.layers[0].mlp.up_proj) is nn.Linear
    assert native_and_ours(model).runs_by == "orca"
