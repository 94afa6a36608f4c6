"""Promise: what trainers put around a model's forward is no reason to go native; what a user puts there is."""

import copy

import pytest
import torch
from accelerate.utils.operations import convert_outputs_to_fp32
from tiny import PROMPTS, make_model, pad_left
from trl.trainer.utils import add_fused_lm_head

import orca_hf
from orca_hf import OrcaConfig

BATCH = {**pad_left(PROMPTS), "max_new_tokens": 8, "do_sample": False}


def mixed_precision(model):
    """As Accelerator.prepare does it: Trainer(bf16=True), for one."""
    narrowed = torch.autocast("cpu", dtype=torch.bfloat16)(model.forward.__func__)
    model.forward = convert_outputs_to_fp32(narrowed).__get__(model)


def decorated(model):
    model.forward = torch.autocast("cpu", dtype=torch.bfloat16)(model.forward)


def disabled(model):
    model.forward = torch.autocast("cpu", enabled=False)(model.forward)


def looks_at_rows(model):
    original = model.forward
    model.forward = lambda *args, **kwargs: original(*args, **kwargs)


def within(model):
    """Autocast over a part of the model: K/V of other layers would be of another dtype."""
    decorated(model.model.layers[1].self_attn)


BFLOAT16 = ("cpu", torch.bfloat16)
KNOWN = {
    "TRL's": ([add_fused_lm_head], None),
    "accelerate's": ([mixed_precision], BFLOAT16),
    "accelerate's over TRL's": ([add_fused_lm_head, mixed_precision], BFLOAT16),
    "a decorator of PyTorch": ([decorated], BFLOAT16),
    "one without effect": ([disabled], None),
    "one in one": ([disabled, decorated], None),
}
UNKNOWN = {
    "a user's": [looks_at_rows],
    "TRL's over a user's": [looks_at_rows, add_fused_lm_head],
    "accelerate's over a user's": [looks_at_rows, decorated],
    "a user's over TRL's": [add_fused_lm_head, looks_at_rows],
    "autocast in a part": [within],
}


@pytest.mark.parametrize("name", KNOWN)
def test_a_trainers_forward_runs_by_orca_under_its_own_autocast(name):
    wrappers, autocast = KNOWN[name]
    plain, model = make_model(), orca_hf.wrap(make_model(), OrcaConfig(max_slots=512))
    model.generate(**BATCH)
    for each in (plain, model):
        for put_around in wrappers:
            put_around(each)
    assert orca_hf.explain(model).runs_by == "orca"
    native, ours = (
        each.generate(**BATCH, return_dict_in_generate=True, output_logits=True, use_cache=False)
        for each in (plain, model)
    )
    assert model.generate.engines[-1].runner.autocast == autocast
    assert ours.logits[0].dtype == native.logits[0].dtype
    if autocast is None:
        assert torch.equal(ours.sequences, native.sequences)
    else:
        torch.testing.assert_close(ours.logits[0], native.logits[0], atol=0.1, rtol=0.05)


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_users_forward_goes_native_wherever_it_is(name):
    model = orca_hf.wrap(make_model(), OrcaConfig(max_slots=512))
    for put_around in UNKNOWN[name]:
        put_around(model)
    assert "forward of its own" in str(orca_hf.explain(model))


def test_a_copys_forward_that_still_runs_the_original_goes_native():
    """Natively a deep copy of what TRL has patched runs the weights of the model that it was copied from."""
    results = []
    for wrapped in (False, True):
        model = make_model()
        if wrapped:
            orca_hf.wrap(model, OrcaConfig(max_slots=512))
        add_fused_lm_head(model)
        twin = copy.deepcopy(model)
        with torch.no_grad():
            twin.lm_head.weight.neg_()
        results.append(twin.generate(**BATCH))
    assert torch.equal(*results)
    assert "forward of its own" in str(orca_hf.explain(twin))
