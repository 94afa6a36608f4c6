"""Promise: for each listed architecture, the wrapped model's greedy tokens are native generate()'s, row by row."""

import pytest
import torch
from tiny import ARCHITECTURES, PROMPTS, make_model, pad_left

import orca_hf
from orca_hf import OrcaConfig

CONFIGS = [
    OrcaConfig(max_batch_size=1, max_batch_tokens=1, max_slots=128, block_size=4),
    OrcaConfig(max_batch_size=2, max_batch_tokens=5, max_slots=64, block_size=8),
    OrcaConfig(max_batch_size=4, max_batch_tokens=None, max_slots=512, block_size=16),
    OrcaConfig(max_slots=4096),
]


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_greedy_tokens_equal_native(model_type):
    model = make_model(model_type)
    batch = pad_left(PROMPTS)
    native = model.generate(**batch, max_new_tokens=16, do_sample=False)
    assert len(set(native[:, -16:].flatten().tolist())) > 8, "the model repeats itself: too weak an oracle"
    for config in CONFIGS:
        orca_hf.wrap(model, config)
        assert orca_hf.explain(model, **batch, max_new_tokens=16).runs_by == "orca"
        ours = model.generate(**batch, max_new_tokens=16, do_sample=False)
        assert torch.equal(ours, native), config
    assert model.generate.engines[0].stats.num_iterations <= 16


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_a_row_alone_equals_native(model_type):
    model = make_model(model_type, seed=1)
    prompt = torch.tensor([PROMPTS[0]])
    native = model.generate(prompt, max_new_tokens=12, do_sample=False)
    orca_hf.wrap(model, OrcaConfig(max_batch_size=4, max_batch_tokens=4, max_slots=256))
    assert torch.equal(model.generate(prompt, max_new_tokens=12, do_sample=False), native)


@pytest.mark.parametrize("model_type", ["llama", "falcon:grouped", "falcon:alibi", "mpt", "gpt_neo", "xglm"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_agrees_where_the_choice_is_clear(dtype, model_type):
    """Rounding differs with the shape of a batch, natively too: a row may part from native only at a near tie."""
    model = make_model(model_type).to(dtype)
    batch = pad_left(PROMPTS)
    options = {"max_new_tokens": 16, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    native = model.generate(**batch, **options)
    ours = orca_hf.wrap(model).generate(**batch, **options)
    assert orca_hf.explain(model).runs_by == "orca"
    assert ours.logits[0].dtype == native.logits[0].dtype
    for row in range(len(PROMPTS)):
        for step in range(16):
            ours_token, native_token = ours.sequences[row, step - 16], native.sequences[row, step - 16]
            if ours_token != native_token:
                top = native.logits[step][row].topk(2).values
                assert top[0] - top[1] <= 8 * torch.finfo(dtype).eps * top[0].abs(), (row, step)
                break


def test_an_untested_architecture_is_compared_with_its_native_forward_first():
    """Starcoder2 is not on the list, and its attention interface is the usual one."""
    model = make_model("starcoder2", num_key_value_heads=2)
    batch = pad_left(PROMPTS)
    native = model.generate(**batch, max_new_tokens=8, do_sample=False)
    orca_hf.wrap(model)
    assert orca_hf.explain(model).runs_by == "orca"
    assert torch.equal(model.generate(**batch, max_new_tokens=8, do_sample=False), native)


def test_a_model_that_differs_from_its_native_forward_goes_native(monkeypatch, caplog):
    model = make_model()
    attention = type(model.model.layers[0].self_attn)
    plain = attention.forward

    def odd(self, *args, **kwargs):
        """An attention that looks at the shape of its batch, as no causal model does."""
        output, weights = plain(self, *args, **kwargs)
        return output * (1 + output.shape[1]), weights

    monkeypatch.setattr(attention, "forward", odd)
    batch = pad_left(PROMPTS)
    native = model.generate(**batch, max_new_tokens=4, do_sample=False)
    orca_hf.wrap(model, OrcaConfig(trust_modules=(__name__,)))
    assert torch.equal(model.generate(**batch, max_new_tokens=4, do_sample=False), native)
    assert "differ from the native forward" in str(orca_hf.explain(model))
    assert "differ from the native forward" in caplog.text


def test_a_model_that_ignores_the_window_its_native_cache_keeps_goes_native():
    """Llama has no sliding window, but transformers gives a config that names one a cache that forgets."""
    for model_type, window in (("llama", 6), ("gpt2", 6), ("mistral", 1)):
        model = make_model(model_type, sliding_window=window)
        batch = {**pad_left(PROMPTS), "max_new_tokens": 10, "do_sample": False}
        native = model.generate(**batch)
        orca_hf.wrap(model)
        assert torch.equal(model.generate(**batch), native)
        assert "native cache keeps" in str(orca_hf.explain(model))


NATIVE_MODELS = [
    ("mamba", {"state_size": 4, "num_hidden_layers": 2, "hidden_size": 32}, "recurrent state"),
    ("openai-gpt", {"n_embd": 32, "n_layer": 2, "n_head": 4}, "attention interface"),
]


@pytest.mark.parametrize(
    ("model_type", "overrides", "reason"),
    NATIVE_MODELS,
    ids=["mamba", "own-attention"],
)
def test_what_orca_cannot_run_goes_native_with_its_reason(model_type, overrides, reason, caplog):
    model = make_model(model_type, **overrides)
    prompt = torch.tensor([PROMPTS[0]])
    native = model.generate(prompt, max_new_tokens=4, do_sample=False)
    orca_hf.wrap(model)
    assert torch.equal(model.generate(prompt, max_new_tokens=4, do_sample=False), native)
    model.generate(prompt, max_new_tokens=4, do_sample=False)
    explanation = orca_hf.explain(model)
    assert explanation.runs_by == "native"
    assert reason in str(explanation)
    assert caplog.text.count(reason) == 1, "the reason is logged once"


LLAMA4 = {"num_local_experts": 2, "intermediate_size_mlp": 32, "num_key_value_heads": 2, "head_dim": 16}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 6, "long_factor": [4.0] * 6, "rope_theta": 10000.0}
# Rows may have up to 24 tokens, where the frequencies or the temperature begin to depend on the longest row.
LENGTH_DEPENDENT = [
    (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, "max_position_embeddings": 24},
    ),
    ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 24}),
    ("llama4_text", {**LLAMA4, "layer_types": ["full_attention"] * 2, "no_rope_layers": [0, 1], "floor_scale": 24}),
]


@pytest.mark.parametrize(("model_type", "overrides"), LENGTH_DEPENDENT, ids=["dynamic", "longrope", "temperature"])
def test_rows_run_by_orca_up_to_the_length_where_they_would_depend_on_others(model_type, overrides):
    model = make_model(model_type, **overrides)
    batch = pad_left(PROMPTS)
    lengths = {13: "orca", 14: "native", 20: "native", 12: "orca"}  # beside 11 of the prompt
    native = {length: model.generate(**batch, max_new_tokens=length, do_sample=False) for length in lengths}
    orca_hf.wrap(model, OrcaConfig(max_batch_size=3, max_batch_tokens=7, max_slots=256, block_size=8))
    for length, runs_by in lengths.items():
        assert orca_hf.explain(model, **batch, max_new_tokens=length).runs_by == runs_by
        assert torch.equal(model.generate(**batch, max_new_tokens=length, do_sample=False), native[length])


def test_an_attention_temperature_wants_small_iterations():
    model = make_model("llama4_text", **LLAMA4, layer_types=["full_attention"] * 2, floor_scale=24)
    orca_hf.wrap(model, OrcaConfig(max_batch_tokens=None))
    assert "iterations of 23 tokens at most" in str(orca_hf.explain(model))


@pytest.mark.parametrize(("chunk_size", "runs_by"), [(8, "orca"), (16, "orca"), (6, "native")])
def test_chunked_attention_equals_native(chunk_size, runs_by):
    model = make_model("llama4_text", **LLAMA4, attention_chunk_size=chunk_size, num_hidden_layers=4)
    assert set(model.config.layer_types) == {"chunked_attention", "full_attention"}
    batch = pad_left(PROMPTS)
    native = model.generate(**batch, max_new_tokens=20, do_sample=False)
    for block_size in (4, 8):
        orca_hf.wrap(model, OrcaConfig(max_batch_size=3, max_batch_tokens=5, max_slots=256, block_size=block_size))
        assert orca_hf.explain(model).runs_by == runs_by
        assert torch.equal(model.generate(**batch, max_new_tokens=20, do_sample=False), native)
