"""Promises of fused forwards: for modules known word for word, equal to their own, given up where they differ."""

import copy
import logging

import pytest
import torch
from tiny import PROMPTS, make_model, pad_left
from torch import nn
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm

import orca_hf
from orca_hf import OrcaConfig
from orca_hf.fused_forwards import FusedAttention, FusedMLP, FusedNorm
from orca_hf.fused_layer import FusedLayer, fuse
from orca_hf.packed_weights import PackedWeights
from orca_hf.same_code import Snapshots, has_same_forward
from orca_kernels import compiled

KINDS = {FusedLayer: "layer", FusedNorm: "norm", FusedMLP: "mlp", FusedAttention: "attention"}
# model type -> the kinds of modules that are fused in it
FUSED = {
    "llama": {"norm", "layer"},
    "mistral": {"norm", "layer"},
    "qwen2": {"norm", "layer"},
    "qwen3": {"norm", "layer"},
    "granite": {"norm", "mlp", "attention"},
    "gemma": {"norm", "layer"},
    "gemma2": {"norm", "mlp"},
    "olmo2": {"norm", "mlp"},
    "gpt2": set(),
}
LENGTH = 24  # of answers long enough that packing pays


@pytest.fixture(name="library")
def _library():
    found = compiled.library()
    if found is None:
        pytest.skip("the kernels cannot be compiled on this machine")
    return found


def forwards_of(model):
    return [forward for engine in model.generate.engines for forward in engine.runner.packed.forwards]


@pytest.mark.parametrize("model_type", FUSED)
def test_what_is_known_is_fused_and_computes_the_same(library, model_type):
    native, batch = make_model(model_type), pad_left(PROMPTS)
    options = {"max_new_tokens": LENGTH, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    model = orca_hf.wrap(copy.deepcopy(native), OrcaConfig(max_slots=512))
    expected, ours = native.generate(**batch, **options), model.generate(**batch, **options)
    assert torch.equal(ours.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(ours.logits), torch.stack(expected.logits), rtol=1e-3, atol=1e-3)
    fused = [forward for forward in forwards_of(model) if type(forward) in KINDS]
    assert {KINDS[type(forward)] for forward in fused} == FUSED[model_type]
    assert all(forward.is_right for forward in fused), "each has been held against the module's own forward"


class Scaled(LlamaRMSNorm):
    def forward(self, hidden_states):
        return super().forward(hidden_states) * 2


class Clipped(LlamaMLP):
    def forward(self, x):
        down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return down_proj.clamp(-1, 1)


class Called(LlamaMLP):
    def __call__(self, x):
        return -super().__call__(x)


class Renamed(LlamaMLP):
    pass


def namesake():
    """A norm of the same words, in which a word means something else."""
    namespace = {"torch": type("torch", (), {"float32": torch.float32, "rsqrt": torch.sqrt})}
    source = (
        "def forward(self, hidden_states):\n"
        "    input_dtype = hidden_states.dtype\n"
        "    hidden_states = hidden_states.to(torch.float32)\n"
        "    variance = hidden_states.pow(2).mean(-1, keepdim=True)\n"
        "    hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)\n"
        "    return self.weight * hidden_states.to(input_dtype)\n"
    )
    exec(source, namespace)
    return type("Namesake", (LlamaRMSNorm,), {"forward": namespace["forward"]})


SAME = [
    ("itself", LlamaRMSNorm, LlamaRMSNorm, True),
    ("a subclass that changes nothing", Renamed, LlamaMLP, True),
    ("one that calls the known forward", Scaled, LlamaRMSNorm, False),
    ("a call of its own", Called, LlamaMLP, False),
    ("one more operation", Clipped, LlamaMLP, False),
    ("the same words with another meaning", namesake(), LlamaRMSNorm, False),
    ("something else", nn.LayerNorm, LlamaRMSNorm, False),
]


@pytest.mark.parametrize(("this", "known", "same"), [case[1:] for case in SAME], ids=[case[0] for case in SAME])
def test_the_same_is_the_same_to_the_last_word(this, known, same):
    assert has_same_forward(this, known) is same


def test_models_whose_rotary_embedding_differs_are_told_apart():
    """cohere's attention has llama's words, but turns other pairs."""
    cohere = make_model("cohere")
    attention = next(module for module in cohere.modules() if type(module).__name__ == "CohereAttention")
    assert not has_same_forward(type(attention), LlamaAttention)


def test_an_activation_that_the_kernels_lack_is_left_alone(library):
    config = make_model("llama", hidden_act="relu").config
    assert fuse(LlamaMLP(config), library, Snapshots()) is None


def test_what_turns_out_to_differ_is_given_up(library, caplog):
    norm = LlamaRMSNorm(64)
    forward = fuse(norm, library, Snapshots())
    forward.offset = 0.5  # as if a later transformers meant something else
    hidden = torch.randn(1, 3, 64)
    with torch.no_grad(), caplog.at_level(logging.WARNING, "orca_hf.fused_forwards"):
        for _ in range(2):
            torch.testing.assert_close(forward(hidden), norm(hidden))
    assert forward.is_right is False
    assert [record.args[0] for record in caplog.records] == ["LlamaRMSNorm"]


ELSEWHERE = {
    "with gradients": lambda forward, hidden: forward(hidden.requires_grad_()),
    "in float64": lambda forward, hidden: forward(hidden.double()),
    "in bfloat16": lambda forward, hidden: forward(hidden.bfloat16()),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_elsewhere_it_is_the_modules_own(library, name):
    norm = LlamaRMSNorm(64)
    forward, hidden = fuse(norm, library, Snapshots()), torch.randn(1, 3, 64)
    grad = torch.enable_grad() if name == "with gradients" else torch.no_grad()
    with grad:
        ours, expected = ELSEWHERE[name](forward, hidden.clone()), ELSEWHERE[name](norm, hidden.clone())
    assert torch.equal(ours, expected)
    assert ours.requires_grad == expected.requires_grad


CHANGES = {
    "another weight": lambda mlp: setattr(mlp.up_proj, "weight", nn.Parameter(torch.randn_like(mlp.up_proj.weight))),
    "a write": lambda mlp: mlp.gate_proj.weight.mul_(2),
    "a hook": lambda mlp: mlp.down_proj.register_forward_hook(lambda module, args, output: output * 3),
    "a forward": lambda mlp: setattr(mlp.gate_proj, "forward", lambda hidden: hidden.new_ones(*hidden.shape[:-1], 64)),
}


def double_mlp(monkeypatch):
    forward = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: 2 * forward(self, x))


def no_rotation(monkeypatch):
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda q, k, cos, sin, unsqueeze_dim=1: (q, k))


REPLACED = {"a class's forward": double_mlp, "a function of its file": no_rotation}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", REPLACED)
def test_what_is_replaced_for_the_whole_process_is_honoured(library, monkeypatch, name, when):
    model, batch = orca_hf.wrap(make_model(), OrcaConfig(max_slots=512)), pad_left(PROMPTS)
    options = {"max_new_tokens": LENGTH, "do_sample": False}
    plain = model.generate(**batch, **options) if when == "after" else None
    REPLACED[name](monkeypatch)
    expected = make_model().generate(**batch, **options)
    assert plain is None or not torch.equal(plain, expected)
    assert torch.equal(model.generate(**batch, **options), expected)


@pytest.mark.parametrize("name", CHANGES)
@torch.no_grad()
def test_a_change_of_a_linear_is_seen_before_the_next_iteration(library, name):
    config = make_model("llama", hidden_size=64, intermediate_size=64).config
    mlp = LlamaMLP(config)
    packed = PackedWeights()
    packed.pack(list(mlp.modules()), max_bytes=lambda: 10**9)
    (forward,) = packed.forwards
    hidden = torch.randn(1, 3, 64)
    torch.testing.assert_close(forward(hidden), mlp(hidden))
    CHANGES[name](mlp)
    packed.refresh(deep=False)
    ours = next((forward for forward in packed.forwards if forward.module is mlp), mlp)
    for _ in range(2):
        torch.testing.assert_close(ours(hidden), mlp(hidden))
