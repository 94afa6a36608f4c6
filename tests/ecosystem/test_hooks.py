"""Promise: hooks, parametrizations and other guests in a model's modules act as natively, whenever they come and go."""

from dataclasses import replace

import pytest
import torch
from tiny import PROMPTS, make_model, pad_left
from torch import nn
from torch.nn.modules import module as all_modules
from torch.nn.utils import parametrizations, parametrize, prune

import orca_hf
from orca_hf import OrcaConfig

BATCH = {**pad_left(PROMPTS), "max_new_tokens": 20, "do_sample": False}
CONFIG = OrcaConfig(max_slots=512)


def up_proj(model):
    return model.model.layers[0].mlp.up_proj


def of_first_row(module, args, output):
    """Sees a batch's rows, of which Orca's layout has only one."""
    if isinstance(module, nn.Linear):
        output = output.clone()
        output[0] *= 1.5
    return output


def into_first_row(module, args):
    if isinstance(module, nn.Linear):
        hidden = args[0].clone()
        hidden[0] *= 1.5
        return (hidden, *args[1:])
    return None


FORWARD_HOOKS = {
    "a module's": lambda model: up_proj(model).register_forward_hook(of_first_row),
    "a module's, always called": lambda model: up_proj(model).register_forward_hook(of_first_row, always_call=True),
    "a module's, before": lambda model: up_proj(model).register_forward_pre_hook(into_first_row),
    "all modules'": lambda model: all_modules.register_module_forward_hook(of_first_row),
    "all modules', before": lambda model: all_modules.register_module_forward_pre_hook(into_first_row),
}


@pytest.mark.parametrize("when", ["before wrapping", "after wrapping", "after a call"])
@pytest.mark.parametrize("name", FORWARD_HOOKS)
def test_a_forward_hook_means_native_until_it_is_removed(name, when):
    plain, model = make_model(), make_model()
    without = plain.generate(**BATCH)
    if when != "before wrapping":
        orca_hf.wrap(model, CONFIG)
    if when == "after a call":
        assert torch.equal(model.generate(**BATCH), without)
    handle = FORWARD_HOOKS[name](model)
    try:
        native = type(model).generate(model, **BATCH)
        orca_hf.wrap(model)
        assert not torch.equal(native, without)
        assert torch.equal(model.generate(**BATCH), native)
        assert "forward hook" in str(orca_hf.explain(model))
    finally:
        handle.remove()
    assert torch.equal(model.generate(**BATCH), without)
    assert orca_hf.explain(model).runs_by == "orca"


def no_change(*args):
    return None


BACKWARD_HOOKS = {
    "full": lambda model: up_proj(model).register_full_backward_hook(no_change),
    "before": lambda model: up_proj(model).register_full_backward_pre_hook(no_change),
    "old": lambda model: up_proj(model).register_backward_hook(no_change),
    "all modules'": lambda model: all_modules.register_module_full_backward_pre_hook(no_change),
    "a parameter's": lambda model: up_proj(model).weight.register_hook(no_change),
}


@pytest.mark.parametrize("name", BACKWARD_HOOKS)
def test_backward_hooks_see_nothing_of_a_generation(name):
    model = make_model()
    expected = model.generate(**BATCH)
    handle = BACKWARD_HOOKS[name](model)
    try:
        orca_hf.wrap(model, CONFIG)
        assert torch.equal(model.generate(**BATCH), expected)
        assert orca_hf.explain(model).runs_by == "orca"
    finally:
        handle.remove()


class Negative(nn.Module):
    def forward(self, weight):
        return -weight


class ByBatch(torch.Tensor):
    """A weight whose product depends on the shape of the batch, as that of a quantised one might."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        result = super().__torch_function__(function, types, args, kwargs or {})
        if function is nn.functional.linear:
            return result.as_subclass(torch.Tensor) * (args[0].shape[0] / args[0].shape[1])
        return result


class Normed(nn.Module):
    """Has statistics, which its training mode writes with every forward."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(48)

    def forward(self, hidden):
        return self.norm(hidden.transpose(1, 2)).transpose(1, 2)


def batch_norm(model):
    model.model.layers[1].post_attention_layernorm = Normed().train(model.training)


def weight_norm(model):
    parametrizations.weight_norm(up_proj(model))
    up_proj(model).parametrizations.weight.original0.data.mul_(2)


def spectral_norm(model):
    torch.manual_seed(0)
    parametrizations.spectral_norm(up_proj(model))


def pruned(model):
    torch.manual_seed(0)
    prune.random_unstructured(up_proj(model), "weight", 0.5)


def pruned_for_good(model):
    pruned(model)
    prune.remove(up_proj(model), "weight")


def resized(model):
    torch.manual_seed(0)
    model.resize_token_embeddings(60, mean_resizing=False)


def tied(model):
    model.lm_head.weight = model.model.embed_tokens.weight


def subclassed(model):
    up_proj(model).weight = nn.Parameter((-up_proj(model).weight.detach()).as_subclass(ByBatch))


GUESTS = {
    "a parametrization": (lambda model: parametrize.register_parametrization(up_proj(model), "weight", Negative()), ""),
    "weight norm": (weight_norm, ""),
    "spectral norm": (spectral_norm, ""),
    "spectral norm in training": (lambda model: spectral_norm(model.train()), "training mode"),
    "batch norm": (batch_norm, "code of your own"),
    "batch norm in training": (lambda model: batch_norm(model.train()), "training mode"),
    "a pruning mask": (pruned, "forward hook"),
    "pruned for good": (pruned_for_good, ""),
    "a smaller vocabulary": (resized, ""),
    "tied embeddings": (tied, ""),
    "a weight of another class": (subclassed, "trial iteration"),
}


@pytest.mark.parametrize("name", GUESTS)
def test_what_moves_into_a_wrapped_model_acts_as_natively(name):
    move_in, reason = GUESTS[name]
    plain, model = make_model(), orca_hf.wrap(make_model(), CONFIG)
    before = model.generate(**BATCH)
    for each in (plain, model):
        move_in(each)
    native = plain.generate(**BATCH)
    assert not torch.equal(native, before)
    assert torch.equal(model.generate(**BATCH), native)
    assert torch.equal(model.generate(**BATCH), plain.generate(**BATCH)), "what a forward counts is counted as natively"
    explanation = orca_hf.explain(model)
    assert reason in str(explanation)
    assert explanation.runs_by == ("native" if reason else "orca")
    for ours, natives in zip(model.buffers(), plain.buffers(), strict=True):
        assert torch.equal(ours, natives)


def test_a_batch_norm_set_to_training_after_a_call_is_noticed():
    plain, model = make_model(), make_model()
    for each in (plain, model):
        batch_norm(each)
    orca_hf.wrap(model, replace(CONFIG, trust_modules=(__name__,))).generate(**BATCH)
    assert orca_hf.explain(model).runs_by == "orca"
    for each in (plain, model):
        each.train()
    assert torch.equal(model.generate(**BATCH), plain.generate(**BATCH))
    for ours, natives in zip(model.buffers(), plain.buffers(), strict=True):
        assert torch.equal(ours, natives)


class Calls(nn.Module):
    """Has functional_call run a generate() on other weights."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self):
        return self.model.generate(**BATCH)


def test_functional_call_puts_other_weights_in_for_one_call():
    model, other = orca_hf.wrap(make_model(), CONFIG), make_model(seed=9)
    expected, others = make_model().generate(**BATCH), other.generate(**BATCH)
    weights = {f"model.{name}": parameter.detach() for name, parameter in other.named_parameters()}
    for _ in range(2):
        assert torch.equal(model.generate(**BATCH), expected)
        assert torch.equal(torch.func.functional_call(Calls(model), weights, ()), others)
    assert torch.equal(model.generate(**BATCH), expected)
    with torch.no_grad():
        ours = torch.func.functional_call(model, dict(other.named_parameters()), (BATCH["input_ids"],)).logits
        assert torch.equal(ours, other(BATCH["input_ids"]).logits)
