"""Promise: adapters, however they come, change or go between calls, are in a wrapped model's tokens as natively."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from peft import IA3Config, LoHaConfig, LoraConfig, PeftModel, get_peft_model
from tiny import PROMPTS, make_model, pad_left

import orca_hf
from orca_hf import OrcaConfig

BATCH = {**pad_left(PROMPTS), "max_new_tokens": 20, "do_sample": False}


def lora(**options):
    options = {"r": 4, "init_lora_weights": False, "target_modules": ["q_proj", "v_proj", "down_proj"], **options}
    return LoraConfig(task_type="CAUSAL_LM", **options)


def wrap(model):
    return orca_hf.wrap(model, OrcaConfig(max_slots=1024))


def base_with(wrapped, *, after=False, config=None):
    """A PEFT model, wrapped before or after PEFT came."""
    model = make_model()
    if wrapped and not after:
        wrap(model)
    torch.manual_seed(1)
    adapted = get_peft_model(model, config or lora())
    return wrap(adapted) if wrapped and after else adapted


def switch(model, answer):
    model.add_adapter("second", lora(r=2))
    for name in ("second", "default", "second"):
        model.set_adapter(name)
        yield answer()


def disable(model, answer):
    yield answer()
    with model.disable_adapter():
        yield answer()
    yield answer()


def merge_in_place(model, answer):
    yield answer()
    model.merge_adapter()
    yield answer()
    model.unmerge_adapter()
    yield answer()


def merge_and_unload(model, answer):
    yield answer()
    plain = model.merge_and_unload()
    yield plain.generate(**BATCH)


def weigh_together(model, answer):
    model.add_adapter("second", lora())
    model.add_weighted_adapter(["default", "second"], [0.6, 0.9], "both", combination_type="linear")
    for name in ("both", "default"):
        model.set_adapter(name)
        yield answer()


def several_active(model, answer):
    yield answer()
    model.add_adapter("second", lora(r=2))
    model.base_model.set_adapter(["default", "second"])
    yield answer()


def delete(model, answer):
    model.add_adapter("second", lora(r=2))
    model.set_adapter("second")
    yield answer()
    model.set_adapter("default")
    model.delete_adapter("second")
    yield answer()


def scale(model, answer):
    yield answer()
    for module in model.modules():
        if hasattr(module, "scale_layer"):
            module.scale_layer(3.0)
    yield answer()


def write_through_data(model, answer):
    yield answer()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.mul_(-2)
    yield answer()


def train(model, answer):
    yield answer()
    optimizer = torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], lr=1.0)
    for _ in range(2):
        model(input_ids=BATCH["input_ids"], labels=BATCH["input_ids"]).loss.backward()
        optimizer.step()
        yield answer()


LIVES = [
    switch, disable, merge_in_place, merge_and_unload, weigh_together, several_active, delete, scale,
    write_through_data, train,
]  # fmt: skip


@pytest.mark.parametrize("after", [False, True], ids=["wrapped first", "adapted first"])
@pytest.mark.parametrize("life", LIVES, ids=lambda life: life.__name__)
def test_what_becomes_of_an_adapter_is_seen_by_the_next_call(life, after):
    results = []
    for wrapped in (False, True):
        model = base_with(wrapped, after=after)
        inner = model.get_base_model()
        torch.manual_seed(2)
        results.append(list(life(model, lambda model=model: model.generate(**BATCH))))
    for native, ours in zip(*results, strict=True):
        assert torch.equal(ours, native)
    assert not torch.equal(results[0][0], make_model().generate(**BATCH))
    assert orca_hf.explain(inner).runs_by == "orca"
    assert inner.generate.engines[0].stats.num_iterations >= 20


@pytest.mark.parametrize(
    "config",
    [
        lora(use_dora=True),
        lora(target_modules="all-linear", use_rslora=True),
        lora(target_modules=["q_proj"], modules_to_save=["lm_head"]),
        lora(target_modules=["embed_tokens", "q_proj"]),
        LoHaConfig(task_type="CAUSAL_LM", r=4, init_weights=False, target_modules=["q_proj", "up_proj"]),
        IA3Config(
            task_type="CAUSAL_LM",
            init_ia3_weights=False,
            target_modules=["k_proj", "down_proj"],
            feedforward_modules=["down_proj"],
        ),
    ],
    ids=["DoRA", "all linears", "modules_to_save", "embeddings", "LoHa", "IA3"],
)
def test_kinds_of_adapters(config):
    native, ours = (base_with(wrapped, config=config) for wrapped in (False, True))
    assert torch.equal(ours.generate(**BATCH), native.generate(**BATCH))
    assert orca_hf.explain(ours).runs_by == "orca"
    assert ours.get_base_model().generate.engines[0].stats.num_iterations >= 20


def test_transformers_own_integration(monkeypatch):
    """model.add_adapter and its like: the model stays what it is, and the adapters are hung into it."""
    # transformers 5.24 asks for a PEFT, 0.22, that PyPI does not have yet; the ones before it are called the same way.
    monkeypatch.setattr("transformers.integrations.peft.MIN_PEFT_VERSION", "0.18.0")
    results = []
    for wrapped in (False, True):
        model = make_model()
        if wrapped:
            wrap(model)
        outputs = [model.generate(**BATCH)]
        torch.manual_seed(1)
        model.add_adapter(lora(), adapter_name="one")
        outputs.append(model.generate(**BATCH))
        model.add_adapter(lora(r=2), adapter_name="two")
        for name in ("two", "one", ["one", "two"]):
            model.set_adapter(name)
            outputs.append(model.generate(**BATCH))
        model.disable_adapters()
        outputs.append(model.generate(**BATCH))
        model.enable_adapters()
        outputs.append(model.generate(**BATCH))
        model.delete_adapter("two")
        model.set_adapter("one")
        outputs.append(model.generate(**BATCH))
        results.append(outputs)
    for native, ours in zip(*results, strict=True):
        assert torch.equal(ours, native)
    assert torch.equal(results[0][0], results[0][5])
    assert len({str(output) for output in results[0]}) >= 4
    assert orca_hf.explain(model).runs_by == "orca"


def test_a_saved_adapter_loaded_onto_a_wrapped_model(tmp_path):
    adapted = base_with(wrapped=False)
    expected = adapted.generate(**BATCH)
    adapted.save_pretrained(tmp_path)
    model = wrap(make_model())
    before = model.generate(**BATCH)
    loaded = PeftModel.from_pretrained(model, tmp_path)
    assert torch.equal(loaded.generate(**BATCH), expected)
    assert torch.equal(loaded.unload().generate(**BATCH), before)
    assert orca_hf.explain(model).runs_by == "orca"


def test_threads_under_one_adapter_after_another():
    """Calls that share a batch share the adapters that are active; each gets what it gets alone."""
    native, ours = (base_with(wrapped) for wrapped in (False, True))
    for each in (native, ours):
        torch.manual_seed(2)
        each.add_adapter("second", lora(r=2))
    singles = [{**BATCH, **pad_left([prompt])} for prompt in PROMPTS]
    with ThreadPoolExecutor(len(singles)) as threads:
        for name in ("default", "second", "default"):
            native.set_adapter(name)
            ours.set_adapter(name)
            expected = [native.generate(**single) for single in singles]
            for row, answer in zip(expected, threads.map(lambda single: ours.generate(**single), singles), strict=True):
                assert torch.equal(answer, row)
    assert len(ours.get_base_model().generate.engines) == 1


def test_a_call_for_an_adapter_of_each_row_goes_native():
    """generate(adapter_names=...) mixes adapters in one batch by hooks on every module."""
    results = []
    names = ["default", "second", "__base__", "second", "default"]
    for wrapped in (False, True):
        model = base_with(wrapped)
        torch.manual_seed(2)
        model.add_adapter("second", lora(r=2))
        model.eval()
        results.append(model.generate(**BATCH, adapter_names=names))
    assert torch.equal(*results)
    assert torch.equal(model.generate(**BATCH), base_with(wrapped=False).generate(**BATCH))
