"""Whatever a model's tokens depend on may be edited before its first call or after it, and is heard of natively or not.

The oracle is a twin that is edited in the same way and runs natively.
"""

import copy

import pytest
import torch
from oracle import assert_same_outcome, num_iterations
from tiny import PROMPTS, make_model, pad_left
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.activations import ACT2FN, GELUTanh
from transformers.integrations import sdpa_attention
from transformers.models.gemma import modeling_gemma
from transformers.models.llama import modeling_llama

import orca_hf
from orca_hf import OrcaConfig

LENGTH = 24  # of answers long enough that packing pays
OPTIONS = {"max_new_tokens": LENGTH, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}


def generate(model):
    return model.generate(**pad_left(PROMPTS), **OPTIONS)


def make(model_type, overrides):
    model = make_model(model_type, **copy.deepcopy(overrides))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    return model


def twins(model_type, overrides):
    return make(model_type, overrides), orca_hf.wrap(make(model_type, overrides), OrcaConfig(max_slots=512))


def part(path):
    """An edit of one part of the first layer, as a decorator's argument says where it is."""

    def decorate(edit):
        return lambda model: edit(model.get_submodule(f"model.layers.0.{path}"))

    return decorate


def with_bias(value, dtype=torch.float32, size=None):
    def edit(linear):
        linear.bias = nn.Parameter(torch.full((size or len(linear.weight),), value, dtype=dtype))

    return edit


def fill_data(linear):
    linear.bias.data.fill_(1.5)


@torch.no_grad()
def fill(linear):
    linear.bias.fill_(1.5)


def setting(name, value):
    def edit(module):
        setattr(module, name, value)

    return edit


def as_buffer(linear):
    del linear.bias
    linear.register_buffer("bias", torch.full((len(linear.weight),), 1.5))


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


class Halved(nn.Module):
    def forward(self, weight):
        return weight / 2


def as_gemmas(norm):
    norm.__class__, norm.eps = modeling_gemma.GemmaRMSNorm, 1e-6


def exchange_norms(model):
    first, second = model.model.layers
    first.input_layernorm, first.post_attention_layernorm = second.input_layernorm, nn.Identity()


def odd_view(linear):
    """A weight that begins at an odd place of a flat buffer, as sharding libraries lay them out."""
    flat = torch.empty(linear.weight.numel() + 1)
    flat[1:] = 2 * linear.weight.detach().flatten()
    linear.weight = nn.Parameter(flat[1:].view_as(linear.weight))


def transposed(linear):
    linear.weight = nn.Parameter(2 * linear.weight.detach().t().contiguous().t())


def config_of(**values):
    def edit(model):
        for name, value in values.items():
            setattr(model.config, name, value)

    return edit


def first_layer_type(value):
    def edit(model):
        model.config.layer_types[0] = value

    return edit


def with_mixed_layers(model_type, **overrides):
    types = ["sliding_attention", "full_attention"]
    return model_type, {"num_hidden_layers": 2, "sliding_window": 4, "layer_types": types, **overrides}


LLAMA = ("llama", {})
QWEN2 = ("qwen2", {})
QWEN3 = ("qwen3", {})
GEMMA = ("gemma", {"hidden_activation": "gelu_pytorch_tanh"})
GRANITE = ("granite", {})
# name -> the model, and what is done to it
EDITS = {
    "a norm's epsilon": (LLAMA, part("input_layernorm")(setting("variance_epsilon", 0.5))),
    "a norm's epsilon as a whole number": (LLAMA, part("post_attention_layernorm")(setting("variance_epsilon", 1))),
    "a norm's epsilon as a tensor": (LLAMA, part("input_layernorm")(setting("variance_epsilon", torch.tensor(0.5)))),
    "gemma's epsilon": (GEMMA, part("input_layernorm")(setting("eps", 0.5))),
    "a head norm's epsilon": (QWEN3, part("self_attn.k_norm")(setting("variance_epsilon", 0.5))),
    "a head norm's weight": (QWEN3, part("self_attn.q_norm")(setting("weight", nn.Parameter(torch.full((16,), 2.0))))),
    "a norm's weight of one number": (LLAMA, part("input_layernorm")(setting("weight", nn.Parameter(torch.ones(1))))),
    "a norm's weight written": (LLAMA, part("input_layernorm")(lambda norm: norm.weight.data.mul_(3))),
    "a norm's weight parametrised": (
        LLAMA,
        part("input_layernorm")(lambda norm: parametrize.register_parametrization(norm, "weight", Doubled())),
    ),
    "a norm's method of its own": (GEMMA, part("input_layernorm")(setting("_norm", torch.tanh))),
    "a norm's class": (LLAMA, part("input_layernorm")(as_gemmas)),
    "a bias where there was none": (LLAMA, part("self_attn.v_proj")(with_bias(1.5))),
    "a key's bias where there was none": (LLAMA, part("self_attn.k_proj")(with_bias(1.5))),
    "a bias of a whole attention's": (GRANITE, part("self_attn.v_proj")(with_bias(1.5))),
    "an output's bias": (LLAMA, part("self_attn.o_proj")(with_bias(1.5))),
    "a gate's bias": (LLAMA, part("mlp.gate_proj")(with_bias(1.5))),
    "a down projection's bias": (LLAMA, part("mlp.down_proj")(with_bias(1.5))),
    "a bias of one number": (LLAMA, part("mlp.down_proj")(with_bias(1.5, size=1))),
    "an attention's bias of one number": (QWEN2, part("self_attn.v_proj")(with_bias(1.5, size=1))),
    "a bias of another dtype": (LLAMA, part("mlp.down_proj")(with_bias(1.5, dtype=torch.float64))),
    "a bias of another size": (LLAMA, part("self_attn.o_proj")(with_bias(1.5, size=5))),
    "the head's bias": (LLAMA, lambda model: with_bias(1.5)(model.lm_head)),
    "a bias filled": (QWEN2, part("self_attn.v_proj")(fill)),
    "a bias filled through data": (QWEN2, part("self_attn.v_proj")(fill_data)),
    "a bias deleted": (QWEN2, part("self_attn.v_proj")(lambda linear: delattr(linear, "bias"))),
    "a gate's bias deleted": (LLAMA, part("mlp.gate_proj")(lambda linear: delattr(linear, "bias"))),
    "a bias that is no parameter": (LLAMA, part("self_attn.o_proj")(as_buffer)),
    "a bias taken away": (QWEN2, part("self_attn.k_proj")(setting("bias", None))),
    "a scaling": (LLAMA, part("self_attn")(setting("scaling", 0.9))),
    "a head_dim that does not fit": (LLAMA, part("self_attn")(setting("head_dim", 6))),
    "another activation": (LLAMA, part("mlp")(lambda mlp: setattr(mlp, "act_fn", ACT2FN["relu"]))),
    "an activation's function": (GEMMA, part("mlp.act_fn")(setting("act", functional.relu))),
    "the same MLP twice": (LLAMA, lambda model: setattr(model.model.layers[0], "mlp", model.model.layers[1].mlp)),
    "norms exchanged": (LLAMA, exchange_norms),
    "a projection taken from another layer": (
        LLAMA,
        lambda model: setattr(model.model.layers[0].mlp, "up_proj", model.model.layers[1].mlp.up_proj),
    ),
    "a linear parametrised": (
        LLAMA,
        part("mlp.up_proj")(lambda linear: parametrize.register_parametrization(linear, "weight", Halved())),
    ),
    "weight norm": (LLAMA, part("mlp.up_proj")(lambda linear: parametrizations.weight_norm(linear).weight)),
    "a weight at an odd offset": (LLAMA, part("mlp.up_proj")(odd_view)),
    "a transposed weight": (LLAMA, part("self_attn.q_proj")(transposed)),
    "a linear's inputs miscounted": (LLAMA, part("mlp.down_proj")(setting("in_features", 10**6))),
    "a linear's outputs miscounted": (LLAMA, part("self_attn.o_proj")(setting("out_features", 7))),
    "an embedding's scale": (LLAMA, lambda model: model.model.embed_tokens.weight.data.mul_(2)),
    "a layer's module count": (LLAMA, part("mlp")(lambda mlp: mlp.add_module("probe", nn.Identity()))),
    "config.layer_types of qwen2": (
        with_mixed_layers("qwen2", use_sliding_window=True),
        config_of(layer_types=["full_attention"] * 2),
    ),
    "config.layer_types of qwen3": (
        with_mixed_layers("qwen3", use_sliding_window=True),
        config_of(layer_types=["full_attention"] * 2),
    ),
    "config.layer_types of gemma3": (with_mixed_layers("gemma3_text"), config_of(layer_types=["full_attention"] * 2)),
    "config.layer_types of cohere2": (with_mixed_layers("cohere2"), config_of(layer_types=["full_attention"] * 2)),
    "config.layer_types in another order": (
        with_mixed_layers("qwen3", use_sliding_window=True),
        config_of(layer_types=["full_attention", "sliding_attention"]),
    ),
    "an item of config.layer_types": (
        with_mixed_layers("qwen3", use_sliding_window=True),
        first_layer_type("full_attention"),
    ),
    "config.sliding_window": (("mistral", {"sliding_window": 6}), config_of(sliding_window=3)),
    "a module's window, which no mask asks": (
        with_mixed_layers("qwen3", use_sliding_window=True),
        part("self_attn")(setting("sliding_window", 2)),
    ),
}
UNHEARD = {  # natively nobody reads them
    "a layer's module count",
    "a linear's inputs miscounted",
    "a linear's outputs miscounted",
    "a module's window, which no mask asks",
    "a norm's weight of one number",
    "weight norm",
}


def is_the_same(first, second):
    """Whether two outcomes are the same, by their logits."""
    if isinstance(first.result, Exception) or isinstance(second.result, Exception):
        return False
    return torch.allclose(torch.stack(first.result.logits), torch.stack(second.result.logits), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("when", ["before the first call", "after it"])
@pytest.mark.parametrize("name", EDITS)
def test_an_edit_of_a_model_is_heard(name, when):
    (model_type, overrides), edit = EDITS[name]
    pair = twins(model_type, overrides)
    plain = assert_same_outcome(pair, generate) if when == "after it" else None
    assert plain is None or num_iterations(pair[1]), "the first call runs by Orca"
    for model in pair:
        edit(model)
    edited = assert_same_outcome(pair, generate)
    assert_same_outcome(pair, generate)
    if plain is not None:
        assert is_the_same(plain, edited) is (name in UNHEARD), "what is edited matters, or does not"


def sine(self, hidden):
    return torch.sin(hidden)


def doubled(function):
    return lambda *args, **kwargs: 2 * function(*args, **kwargs)


def negated_attention(function):
    def attend(*args, **kwargs):
        output, weights = function(*args, **kwargs)
        return -output, weights

    return attend


def no_rotation(q, k, cos, sin, unsqueeze_dim=1):
    return q, k


def register(interface, name, function):
    return lambda patch: patch.setitem(interface._global_mapping, name, function)


def put(owner, name, value):
    return lambda patch: patch.setattr(owner, name, value)


def bidirectional(*args, **kwargs):
    return None


EAGER = ("llama", {"attn_implementation": "eager"})
ACTIVATION = type(ACT2FN["silu"])
# name -> the model, and what is replaced for the whole process
REPLACED = {
    "a norm's method": (GEMMA, put(modeling_gemma.GemmaRMSNorm, "_norm", sine)),
    "an activation's forward": (LLAMA, put(ACTIVATION, "forward", sine)),
    "an activation's forward, by a library's": (LLAMA, put(ACTIVATION, "forward", GELUTanh._gelu_tanh_python)),
    "an activation's call": (LLAMA, put(ACTIVATION, "__call__", sine)),
    "functional.silu": (LLAMA, put(functional, "silu", doubled(functional.silu))),
    "functional.silu by PyTorch's": (LLAMA, put(functional, "silu", functional.relu)),
    "torch.rsqrt by PyTorch's": (LLAMA, put(torch, "rsqrt", torch.sqrt)),
    "torch.rsqrt": (LLAMA, put(torch, "rsqrt", doubled(torch.rsqrt))),
    "torch.rsqrt for gemma": (GEMMA, put(torch, "rsqrt", doubled(torch.rsqrt))),
    "Tensor.mean": (LLAMA, put(Tensor, "mean", Tensor.sum)),
    "Tensor.pow": (LLAMA, put(Tensor, "pow", lambda tensor, _: 2 * tensor * tensor)),
    "functional.linear": (LLAMA, put(functional, "linear", doubled(functional.linear))),
    "a linear's forward": (LLAMA, put(nn.Linear, "forward", doubled(nn.Linear.forward))),
    "functional.scaled_dot_product_attention": (
        LLAMA,
        put(functional, "scaled_dot_product_attention", doubled(functional.scaled_dot_product_attention)),
    ),
    "the rotary embedding": (LLAMA, put(modeling_llama, "apply_rotary_pos_emb", no_rotation)),
    "what the rotary embedding calls": (LLAMA, put(modeling_llama, "rotate_half", doubled(modeling_llama.rotate_half))),
    "eager attention": (
        EAGER,
        put(modeling_llama, "eager_attention_forward", negated_attention(modeling_llama.eager_attention_forward)),
    ),
    "what eager attention calls": (EAGER, put(modeling_llama, "repeat_kv", doubled(modeling_llama.repeat_kv))),
    "softmax": (EAGER, put(functional, "softmax", doubled(functional.softmax))),
    "the registered attention": (
        LLAMA,
        register(AttentionInterface, "sdpa", negated_attention(sdpa_attention.sdpa_attention_forward)),
    ),
    "the registered attention by another of transformers'": (
        LLAMA,
        register(AttentionInterface, "sdpa", modeling_gemma.eager_attention_forward),
    ),
    "a file's own attention": (
        LLAMA,
        lambda patch: patch.setitem(
            modeling_llama.ALL_ATTENTION_FUNCTIONS._local_mapping,
            "sdpa",
            negated_attention(sdpa_attention.sdpa_attention_forward),
        ),
    ),
    "what the registered attention calls": (
        LLAMA,
        put(sdpa_attention, "repeat_kv", doubled(sdpa_attention.repeat_kv)),
    ),
    "the registered mask": (LLAMA, register(AttentionMaskInterface, "sdpa", bidirectional)),
    "a file's mask": (LLAMA, put(modeling_llama, "create_causal_mask", bidirectional)),
    "an MLP's forward": (LLAMA, put(modeling_llama.LlamaMLP, "forward", doubled(modeling_llama.LlamaMLP.forward))),
    "an MLP's call": (LLAMA, put(modeling_llama.LlamaMLP, "__call__", doubled(nn.Module.__call__))),
}


@pytest.mark.parametrize("when", ["before the first call", "after it"])
@pytest.mark.parametrize("name", REPLACED)
def test_what_is_replaced_for_the_whole_process_is_heard_and_its_return_too(monkeypatch, name, when):
    (model_type, overrides), replace = REPLACED[name]
    pair = twins(model_type, overrides)
    plain = assert_same_outcome(pair, generate) if when == "after it" else None
    with monkeypatch.context() as patch:
        replace(patch)
        replaced = assert_same_outcome(pair, generate)
    again = assert_same_outcome(pair, generate)
    assert not is_the_same(again, replaced), "what is replaced matters"
    assert plain is None or is_the_same(plain, again)


class DoubledLinears(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return 2 * result if function is functional.linear else result


class DoubledProducts(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return 2 * result if function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default) else result


@pytest.mark.parametrize("mode", [DoubledLinears, DoubledProducts], ids=lambda mode: mode.__name__)
@pytest.mark.parametrize("when", ["before the first call", "after it"])
def test_a_mode_of_the_users_sees_every_operation(mode, when):
    pair = twins(*LLAMA)
    plain = assert_same_outcome(pair, generate) if when == "after it" else None
    with mode():
        under = assert_same_outcome(pair, generate)
    again = assert_same_outcome(pair, generate)
    assert not is_the_same(under, again)
    assert plain is None or is_the_same(plain, again)
    assert num_iterations(pair[1]), "without the mode, calls run by Orca"
    with mode():
        (reason,) = pair[1].generate.explain(**pad_left(PROMPTS), **OPTIONS)
    assert mode.__name__ in reason


def test_a_default_device_is_no_mode_of_the_users():
    model = twins(*LLAMA)[1]
    with torch.device("cpu"):
        assert model.generate.explain(**pad_left(PROMPTS), **OPTIONS) == []
