"""Promise: whatever causal language model type of transformers is wrapped, generate() gives what native gives."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tiny import PROMPTS, pad_left
from tiny_architectures import MODEL_TYPES, make_tiny
from transformers import PreTrainedModel

import orca_hf
from orca_hf import OrcaConfig
from orca_hf.adapters import find_adapter
from orca_hf.runner import CACHE_FIELD

# Requests are cut into chunks, interleaved and queued.
CONFIG = OrcaConfig(max_batch_size=3, max_batch_tokens=5, max_slots=512, block_size=4)

# A type that is new in a later transformers belongs in one of the two: by Orca, or native with a part of its reason.
_ORCA = """
    afmoe apertus apertus1p5_text arcee aria_text axk1 beam bert bert-generation biogpt bitnet bloom camembert
    codegen cohere cohere2 cohere2_moe cohere_compass_text ctrl cwm data2vec-text dbrx deepseek_v2 deepseek_v3
    diffllama dory dots1 electra emu3 ernie ernie4_5 ernie4_5_moe exaone exaone4 exaone_moe falcon flex_olmo flint
    fuyu gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text gemma4 gemma4_text gemma4_unified gemma4_unified_text
    glm glm4 glm4_moe glm4_moe_lite got_ocr2 gpt-sw3 gpt2 gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese gpt_oss
    gptj granite granite_swa granitemoe granitemoe_swa granitemoeshared helium hrm_text hunyuan_v1_dense
    hunyuan_v1_moe hy_v3 hyperclovax internlm3 iquestcoder jais2 jetmoe kolibri1 laguna llama llama4 llama4_text
    longcat_flash mellum mimo_v2_flash minicpm3 minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mixtral
    mllama modernbert-decoder mpt nanochat nemotron olmo olmo2 olmo3 olmoe opt persimmon phi phi3 phi4_multimodal
    phimoe qwen2 qwen2_moe qwen3 qwen3_moe roberta roberta-prelayernorm roc_bert sarvam_mla sarvam_moe seed_oss
    smollm3 solar_open stablelm starcoder2 vaultgemma xglm xlm-roberta xlm-roberta-xl xmod youtu
"""
_NATIVE = {
    "indexed_attention": """
        axk2 deepseek_v32 dots3_note dots3_note_text glm_moe_dsa hy_v4
    """,
    "a recurrent state": """
        bailing_hybrid bamba deepseek_v4 falcon_h1 falcon_mamba granitemoehybrid jamba kimi_linear lara_mini
        mamba mamba2 nemotron_h olmo_hybrid qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next
        qwen4_exp qwen4_exp_text recurrent_gemma rwkv xlstm zamba zamba2 zaya
    """,
    "attention interface": """
        bart big_bird bigbird_pegasus blenderbot blenderbot-small blt cpmant git inkling2_loop_text
        inkling2_text inkling_text marian mbart megatron-bert mvp openai-gpt pegasus plbart prophetnet
        reformer rembert roformer trocr whisper xlm xlnet
    """,
    "mask of its own": """
        doge
    """,
    "takes no position_ids": """
        moss_transcribe_diarize
    """,
    "inputs_embeds and shared_kv_states": """
        gemma4_assistant gemma4_unified_assistant
    """,
    "type conv": """
        lfm2 lfm2_moe lfm3
    """,
    "linear_attention": """
        minimax
    """,
    "native cache keeps": """
        moshi
    """,
    "a generate() of its own": """
        musicgen musicgen_melody
    """,
}
ORCA = frozenset(_ORCA.split())
NATIVE = {model_type: reason for reason, types in _NATIVE.items() for model_type in types.split()}
# No weights make it say two different things.
REPEATS_ITSELF = frozenset({"xlm"})

PADDED = pad_left(PROMPTS)
INPUTS = {"together": PADDED}
INPUTS |= {f"row {row}": {name: value[row : row + 1] for name, value in PADDED.items()} for row in range(len(PROMPTS))}
INPUTS |= {f"unpadded {row}": {"input_ids": torch.tensor([prompt])} for row, prompt in enumerate(PROMPTS)}
OPTIONS = {"greedy": {"max_new_tokens": 16, "do_sample": False}, "sampled": {"max_new_tokens": 8, "do_sample": True}}


def test_every_type_is_decided():
    assert not set(MODEL_TYPES) - ORCA - set(NATIVE)
    assert not ORCA & set(NATIVE)


def outcome(model: PreTrainedModel, inputs: str, options: str) -> torch.Tensor | Exception:
    torch.manual_seed(7)
    try:
        return model.generate(**INPUTS[inputs], **OPTIONS[options])
    except Exception as error:
        return error


def same(ours: torch.Tensor | Exception, native: torch.Tensor | Exception) -> bool:
    if isinstance(native, Exception):
        return type(ours) is type(native)
    return isinstance(ours, torch.Tensor) and ours.dtype == native.dtype and torch.equal(ours, native)


def returned_states(generate: Callable[..., Any]) -> list[tuple[str, list[torch.Tensor]]]:
    """Kind, keys and values of each layer in the cache that `generate` returns."""
    prompt = torch.tensor([PROMPTS[0]])
    output = generate(prompt, max_new_tokens=3, do_sample=False, return_dict_in_generate=True)
    layers = getattr(getattr(output, CACHE_FIELD), "layers", ())
    states = [(getattr(layer, "keys", None), getattr(layer, "values", None)) for layer in layers]
    kinds = [type(layer).__name__ for layer in layers]
    return [(kind, [each for each in state if each is not None]) for kind, state in zip(kinds, states, strict=True)]


def runs_by(model: PreTrainedModel) -> str:
    """How the wrapped `model` runs `PADDED`: by orca, by adapter (which is by Orca, too) or native."""
    how = orca_hf.explain(model, **PADDED, **OPTIONS["greedy"]).runs_by
    return "adapter" if how == "orca" and is_adapted(model) else how


def is_adapted(model: PreTrainedModel) -> bool:
    """Whether Orca has attention code of its own for `model`."""
    return any(find_adapter(module) is not None for module in model.modules())


def why_native(model: PreTrainedModel) -> str:
    """The reasons of a wrapped `model`; empty by Orca."""
    prefix = f"{type(model).__name__} cannot be run by Orca: "
    reasons = orca_hf.explain(model, **PADDED, **OPTIONS["greedy"]).reasons
    return "; ".join(reason.removeprefix(prefix) for reason in reasons)


def num_iterations(model: PreTrainedModel) -> int:
    return sum(engine.num_iterations for engine in orca_hf.explain(model).engines)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_generate_is_native_generate(model_type, record_property):
    model = make_tiny(model_type)
    calls = [(inputs, options) for options in OPTIONS for inputs in INPUTS]
    native = {call: outcome(model, *call) for call in calls}
    orca_hf.wrap(model, CONFIG)
    how, reasons, before = runs_by(model), why_native(model), num_iterations(model)
    ours = {call: outcome(model, *call) for call in calls}

    differing = [" ".join(call) for call in calls if not same(ours[call], native[call])]
    raised = sorted({type(each).__name__ for each in native.values() if isinstance(each, Exception)})
    result = (
        f"differ: {', '.join(differing)}" if differing else f"native raises {', '.join(raised)}" if raised else "equal"
    )
    # The first reason is enough for a table.
    row = {"type": model_type, "runs by": how, "reason": reasons.partition("; ")[0], "tokens": result}
    record_property("architectures", row)

    assert not differing
    assert (how == "native") == (model_type in NATIVE), reasons
    assert NATIVE.get(model_type, "") in reasons
    iterations = num_iterations(model) - before
    if how != "native":
        states, expected = returned_states(model.generate), returned_states(partial(type(model).generate, model))
        assert [kind for kind, _ in states] == [kind for kind, _ in expected]
        for (_, layer), (_, expected_layer) in zip(states, expected, strict=True):
            torch.testing.assert_close(layer, expected_layer, rtol=1e-3, atol=1e-3)
    if how == "native":
        assert iterations == 0
    else:
        # A row's prompt and its tokens do not fit into one iteration, so many have run; fewer where guesses at tokens
        # that repeat were right.
        assert iterations > sum(options["max_new_tokens"] for options in OPTIONS.values()) * len(INPUTS) / 2
    if not raised and model_type not in REPEATS_ITSELF:
        tokens = native["together", "greedy"][:, -OPTIONS["greedy"]["max_new_tokens"] :]
        assert len(set(tokens.flatten().tolist())) > 4, "the model repeats itself: too weak an oracle"


def test_a_window_that_is_in_a_mask_alone_goes_native():
    """Qwen2-moe has layers with a window, and tells its attention nothing of it."""
    model = make_tiny("qwen2_moe", use_sliding_window=True, sliding_window=6, layer_types=["sliding_attention"] * 2)
    native = outcome(model, "together", "greedy")
    orca_hf.wrap(model, CONFIG)
    assert "by a mask alone" in why_native(model)
    assert same(outcome(model, "together", "greedy"), native)


@pytest.mark.parametrize("model_type", ["bert", "electra", "roberta"])
def test_an_encoder_that_is_no_decoder_goes_native(model_type):
    model = make_tiny(model_type, is_decoder=False)
    native = outcome(model, "together", "greedy")
    orca_hf.wrap(model, CONFIG)
    assert "not causal" in why_native(model)
    assert same(outcome(model, "together", "greedy"), native)
