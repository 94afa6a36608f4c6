"""Promises of wrap() and unwrap(): an attribute, no trace, and the model goes on being the user's."""

import copy
import functools
import pickle

import pytest
import torch
from oracle import num_iterations
from tiny import PROMPTS, make_model, pad_left
from torch import nn
from transformers import AttentionInterface, AutoConfig, AutoModel, AutoModelForCausalLM, LlamaForCausalLM

import orca_hf
from orca_hf import ConfigError, ModelError, OrcaConfig

BATCH = {**pad_left(PROMPTS), "max_new_tokens": 20, "do_sample": False}


def trace(model):
    """Everything that wrapping could have left behind."""
    return {
        "attributes": {name: sorted(module.__dict__) for name, module in model.named_modules()},
        "state": {name: (tensor.data_ptr(), tensor._version) for name, tensor in model.state_dict().items()},
        "config": model.config.to_dict(),
        "attention": model.config._attn_implementation,
        "generation": model.generation_config.to_dict(),
        "training": model.training,
        "text": repr(model),
    }


def test_unwrap_leaves_the_model_exactly_as_it_was():
    model = make_model()
    before = trace(model)
    with torch.no_grad():
        logits = model(BATCH["input_ids"]).logits
    orca_hf.wrap(model)
    model.generate(**BATCH)
    with torch.no_grad():
        assert torch.equal(model(BATCH["input_ids"]).logits, logits), "outside an iteration outputs are native's bits"
    wrapped = trace(model)
    assert wrapped.pop("attributes")[""] == sorted([*before["attributes"][""], "generate", "__getstate__"])
    assert wrapped == {name: value for name, value in before.items() if name != "attributes"}
    assert orca_hf.unwrap(model) is model
    assert trace(model) == before
    assert model.generate.__func__ is LlamaForCausalLM.generate


def test_wrap_returns_the_object_and_is_idempotent():
    model = make_model()
    assert not orca_hf.is_wrapped(model)
    assert orca_hf.wrap(model) is model
    assert orca_hf.is_wrapped(model)
    first = model.generate
    assert orca_hf.wrap(model).generate is first
    assert orca_hf.wrap(model, OrcaConfig()).generate is first
    assert orca_hf.wrap(model, OrcaConfig(max_batch_size=3)).generate.config.max_batch_size == 3


def test_unwrapping_a_plain_model_does_nothing():
    model = make_model()
    before = trace(model)
    assert orca_hf.unwrap(model) is model
    assert trace(model) == before


@pytest.mark.parametrize(
    "thing", [None, 3, "llama", nn.Linear(2, 2), object()], ids=["None", "int", "str", "Linear", "object"]
)
def test_what_is_not_a_causal_lm_is_refused(thing):
    with pytest.raises(ModelError, match="causal language model"):
        orca_hf.wrap(thing)
    assert not orca_hf.is_wrapped(thing)


def test_a_model_without_a_head_is_refused():
    model = AutoModel.from_config(make_model().config)
    with pytest.raises(ModelError, match="AutoModelForCausalLM"):
        orca_hf.wrap(model)


def test_settings_of_the_wrong_type_are_refused():
    with pytest.raises(ConfigError, match="OrcaConfig"):
        orca_hf.wrap(make_model(), {"max_batch_size": 3})


def test_an_encoder_decoder_can_be_wrapped_and_runs_natively():
    config = AutoConfig.for_model("t5", d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=50)
    from transformers import T5ForConditionalGeneration

    torch.manual_seed(0)
    model = T5ForConditionalGeneration(config).eval()
    prompt = torch.tensor([[5, 6, 7]])
    expected = model.generate(prompt, max_new_tokens=4, decoder_start_token_id=0)
    orca_hf.wrap(model)
    assert torch.equal(model.generate(prompt, max_new_tokens=4, decoder_start_token_id=0), expected)
    assert "encoder-decoder" in str(orca_hf.explain(model))


@pytest.mark.parametrize(
    "copying", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"]
)
def test_copies_are_wrapped_models_of_their_own(copying):
    model = orca_hf.wrap(make_model(), OrcaConfig(max_slots=512))
    expected = model.generate(**BATCH)
    twin = copying(model)
    assert orca_hf.is_wrapped(twin)
    assert twin.generate is not model.generate
    assert twin.generate.model is twin
    assert twin.generate.config == model.generate.config
    assert torch.equal(twin.generate(**BATCH), expected)
    with torch.no_grad():
        twin.lm_head.weight.neg_()
    assert not torch.equal(twin.generate(**BATCH), expected)
    assert torch.equal(model.generate(**BATCH), expected)


def test_saving_a_wrapped_model_saves_the_plain_one(tmp_path):
    model = orca_hf.wrap(make_model())
    model.generate(**BATCH)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not orca_hf.is_wrapped(again)
    assert torch.equal(again.generate(**BATCH, eos_token_id=None), model.generate(**BATCH))


def test_containers_of_a_model_are_wrapped_at_their_heart():
    model = make_model()
    compiled = torch.compile(model)
    assert orca_hf.wrap(compiled) is compiled
    assert orca_hf.is_wrapped(compiled)
    assert orca_hf.is_wrapped(model)
    assert torch.equal(compiled.generate(**BATCH), make_model().generate(**BATCH))
    orca_hf.unwrap(compiled)
    assert not orca_hf.is_wrapped(model)


CHANGES = {
    "an optimizer's step": lambda model: _train(model),
    "in place": lambda model: model.model.layers[0].mlp.up_proj.weight.mul_(-1),
    "through .data": lambda model: model.model.layers[0].mlp.up_proj.weight.data.mul_(-1),
    "one element through .data": lambda model: model.lm_head.weight.data[:, 7].fill_(3.0),
    "rows swapped through .data": lambda model: _swap_rows(model.lm_head.weight.data),
    "columns swapped through .data": lambda model: _swap_rows(model.model.layers[1].mlp.down_proj.weight.data.t()),
    "a new parameter": lambda model: setattr(
        model.lm_head, "weight", nn.Parameter(model.lm_head.weight.flip(0).contiguous())
    ),
    "load_state_dict": lambda model: model.load_state_dict(make_model(seed=9).state_dict()),
    "a new module": lambda model: setattr(model.model.layers[1], "mlp", make_model(seed=9).model.layers[1].mlp),
    "bfloat16": lambda model: model.to(torch.bfloat16),
    "float64": lambda model: model.to(torch.float64),
    "a forward of the user's": lambda model: setattr(
        model.lm_head, "forward", lambda hidden: nn.functional.linear(hidden, -model.lm_head.weight)
    ),
    "a hook": lambda model: model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: -output),
}


def _train(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with torch.enable_grad():
        model(BATCH["input_ids"], labels=BATCH["input_ids"]).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def _swap_rows(tensor):
    tensor.copy_(tensor.flip(0).clone())


@pytest.mark.parametrize("name", CHANGES)
def test_the_next_call_sees_what_was_done_to_the_model(name):
    plain, model = make_model(), orca_hf.wrap(make_model(), OrcaConfig(max_slots=512))
    before = model.generate(**BATCH)
    assert model.generate.engines[0].stats.packed_bytes > 0, "the weights are packed, which must not outlive them"
    for each in (plain, model):
        with torch.no_grad():
            CHANGES[name](each)
    expected = plain.generate(**BATCH)
    if name != "bfloat16":
        assert not torch.equal(expected, before) or name == "float64"
        assert torch.equal(model.generate(**BATCH), expected)
    else:
        assert model.generate(**BATCH).shape == expected.shape
    assert model.generate.engines[0].runner.pool.layers[0].key.dtype == model.dtype


@pytest.mark.parametrize("when", ["before the first call", "after it"])
@pytest.mark.parametrize(
    ("name", "reason"),
    [("a hook", "forward hook"), ("a forward of the user's", "forward of its own"), ("an attention", "implementation")],
)
def test_what_would_see_one_flat_row_goes_native(name, reason, when):
    """A user's hook, forward or attention may look at rows and positions of a batch, which Orca lays out otherwise."""
    model = orca_hf.wrap(make_model(), OrcaConfig(max_slots=512))
    if when == "after it":
        model.generate(**BATCH)
    if name == "an attention":
        AttentionInterface.register("mine", AttentionInterface()["sdpa"])
        model.set_attn_implementation("mine")
    else:
        CHANGES[name](model)
    explanation = orca_hf.explain(model)
    assert explanation.runs_by == "native"
    assert reason in str(explanation)


def test_a_module_that_does_not_use_the_interface_is_noticed_when_it_comes():
    class Mean(nn.Module):
        def forward(self, hidden_states, **kwargs):
            return hidden_states.mean(1, keepdim=True).expand_as(hidden_states), None

    results = []
    for wrapped in (False, True):
        model = make_model()
        if wrapped:
            orca_hf.wrap(model, OrcaConfig(max_slots=512)).generate(**BATCH)
        model.model.layers[1].self_attn = Mean()
        results.append(model.generate(**BATCH))
    assert torch.equal(*results)


def test_a_reason_that_has_gone_is_not_held_against_the_model(monkeypatch):
    model = orca_hf.wrap(make_model(), OrcaConfig(max_slots=512, trust_modules=(__name__,)))
    with monkeypatch.context() as patch:
        patch.setattr(type(model.model), "forward", lambda self, **kwargs: 1 / 0)
        assert "ZeroDivisionError" in str(orca_hf.explain(model))
    assert orca_hf.explain(model).runs_by == "orca"


def test_training_mode_without_dropout_runs_by_orca_and_with_it_natively():
    model = orca_hf.wrap(make_model()).train()
    assert orca_hf.explain(model).runs_by == "orca"
    expected = make_model().generate(**BATCH)
    assert torch.equal(model.generate(**BATCH), expected)
    assert model.training
    model = orca_hf.wrap(make_model("gpt2", resid_pdrop=0.1)).train()
    assert "dropout" in str(orca_hf.explain(model))
    assert orca_hf.explain(model.eval()).runs_by == "orca"


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_gradient_checkpointing_in_training_mode_is_answered_as_natively(model_type):
    """GPT-2 drops its cache then and goes on from the last token alone; Llama does not."""
    results = []
    for wrapped in (False, True):
        model = make_model(model_type, **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)).train()
        model.gradient_checkpointing_enable()
        if wrapped:
            orca_hf.wrap(model, OrcaConfig(max_slots=512))
        results.append(model.generate(**BATCH))
    assert torch.equal(*results)
    assert "gradient checkpointing" in str(orca_hf.explain(model))
    assert orca_hf.explain(model.eval()).runs_by == "orca"


def test_peft_adapters_are_seen_and_prompt_tuning_goes_native():
    peft = pytest.importorskip("peft")
    from functools import partial

    lora = partial(peft.LoraConfig, r=4, init_lora_weights=False, target_modules=["q_proj", "down_proj"])
    for wrap_first in (True, False):
        results = []
        for wrapped in (True, False):
            model = make_model()
            if wrapped and wrap_first:
                orca_hf.wrap(model)
            torch.manual_seed(0)
            adapted = peft.get_peft_model(model, lora(task_type="CAUSAL_LM"))
            if wrapped and not wrap_first:
                assert orca_hf.wrap(adapted) is adapted
            assert orca_hf.is_wrapped(adapted) == wrapped
            outputs = [adapted.generate(**BATCH)]
            with adapted.disable_adapter():
                outputs.append(adapted.generate(**BATCH))
            adapted.merge_adapter()
            outputs.append(adapted.generate(**BATCH))
            if wrapped:
                assert orca_hf.explain(adapted).runs_by == "orca"
                assert model.generate.engines[0].stats.num_iterations > 20
            results.append(outputs)
        assert all(torch.equal(ours, native) for ours, native in zip(*results, strict=True))
        assert not torch.equal(results[0][0], results[0][1])

    results = []
    for wrapped in (True, False):
        torch.manual_seed(0)
        tuned = peft.get_peft_model(make_model(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
        if wrapped:
            orca_hf.wrap(tuned)
        results.append(tuned.generate(**BATCH))
    assert torch.equal(*results)


def test_explain_speaks_of_a_plain_model_too():
    model = make_model()
    explanation = orca_hf.explain(model, num_beams=2)
    assert explanation.runs_by == "native"
    assert "not wrapped" in str(explanation)
    assert "beam_search" in str(explanation)
    assert not orca_hf.is_wrapped(model)
    assert str(orca_hf.explain(orca_hf.wrap(model))) == "orca"


def other_length(**options):
    return lambda model: functools.partial(model.generate, **options)


FILLED_IN = {
    "a length": other_length(max_new_tokens=5),
    "a length and a mode": other_length(max_new_tokens=5, do_sample=True),
    "twice": lambda model: functools.partial(functools.partial(model.generate, max_new_tokens=7), max_new_tokens=4),
}


@pytest.mark.parametrize("name", FILLED_IN)
def test_a_generate_of_the_instance_with_arguments_filled_in_runs_by_orca(name):
    plain, model = make_model(), make_model()
    call = {**pad_left(PROMPTS), "do_sample": False}
    for each in (plain, model):
        each.generate = FILLED_IN[name](each)
    own = model.generate
    orca_hf.wrap(model)
    for options in ({}, {"max_new_tokens": 3}, {"max_new_tokens": 3, "num_beams": 2}):
        torch.manual_seed(0)
        expected = plain.generate(**{**call, **options})
        torch.manual_seed(0)
        assert torch.equal(model.generate(**{**call, **options}), expected)
    assert num_iterations(model) > 0
    assert orca_hf.explain(model).runs_by == "orca"
    assert torch.equal(
        copy.deepcopy(model).generate(**call, max_new_tokens=3), plain.generate(**call, max_new_tokens=3)
    )
    assert orca_hf.unwrap(model).__dict__["generate"] is own


def test_another_generate_of_the_instance_is_called_and_stays():
    model = make_model()
    calls = []

    def own(*args, **kwargs):
        calls.append(kwargs)
        return type(model).generate(model, *args, **{**kwargs, "max_new_tokens": 2})

    model.generate = own
    expected = own(**BATCH)
    orca_hf.wrap(model)
    assert torch.equal(model.generate(**BATCH), expected)
    assert calls[0] == calls[1] == BATCH
    assert "generate() of its own" in str(orca_hf.explain(model))
    with orca_hf.engine(model).serving() as engine:
        row = engine.submit(PROMPTS[0], max_new_tokens=9, do_sample=False).result(60)
    assert len(row) == len(PROMPTS[0]) + 2
    assert orca_hf.wrap(model, OrcaConfig(max_batch_size=2)).generate.own is own
    assert orca_hf.unwrap(model).__dict__["generate"] is own


def test_a_model_wrapped_before_arguments_are_filled_in_runs_by_orca():
    model = orca_hf.wrap(make_model())
    model.generate = functools.partial(model.generate, max_new_tokens=5)
    expected = make_model().generate(**{**BATCH, "max_new_tokens": 5})
    call = {name: value for name, value in BATCH.items() if name != "max_new_tokens"}
    assert torch.equal(model.generate(**call), expected)
    orca_hf.wrap(model)
    assert torch.equal(model.generate(**call), expected)
    assert orca_hf.explain(model).runs_by == "orca"


def test_a_shallow_copy_has_settings_of_its_own():
    model = orca_hf.wrap(make_model())
    model.generate(**BATCH)
    copies = [copy.copy(make_model()), copy.copy(model)]
    for each in copies:
        each.generation_config = copy.deepcopy(each.generation_config)
        each.generation_config.max_new_tokens = 3
    call = pad_left(PROMPTS)
    assert torch.equal(copies[1].generate(**call), copies[0].generate(**call))
    assert not orca_hf.is_wrapped(copies[1])
    assert orca_hf.is_wrapped(model)
    orca_hf.wrap(copies[1])
    assert torch.equal(copies[1].generate(**call), copies[0].generate(**call))
    assert torch.equal(model.generate(**BATCH), make_model().generate(**BATCH))
    assert orca_hf.is_wrapped(copy.deepcopy(model))
    assert orca_hf.is_wrapped(pickle.loads(pickle.dumps(model)))
