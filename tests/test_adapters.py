"""Promise: models with attention code of their own run by Orca as natively, and stay theirs: no forward is left behind.

That each type's greedy tokens are native's is in test_architectures.py; here is what is special to adapters.
"""

import copy
import pickle
import sys
from threading import Thread

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from tiny import ARCHITECTURES, PROMPTS, make_model, pad_left
from torch import nn
from transformers import set_seed

import orca_hf
from orca_hf import OrcaConfig
from orca_hf.adapters import ADAPTERS, AdaptedForward, adapt, find_adapter
from orca_hf.attention_context import AttentionContext, attention_context
from orca_hf.errors import UnsupportedError
from orca_hf.known_code import KnownCode
from orca_hf.kv_pool import KVPool
from orca_hf.model_eligibility import model_reasons, module_reasons
from orca_hf.patches import IterationPatches
from orca_kernels import RaggedBatch

ADAPTED = [
    name
    for name in ARCHITECTURES
    if name.partition(":")[0] in ("bloom", "falcon", "gpt_neo", "gpt_neox_japanese", "mpt", "xglm")
]
BATCH = {**pad_left(PROMPTS), "max_new_tokens": 12, "do_sample": False}
SMALL = OrcaConfig(max_batch_size=4, max_batch_tokens=5, max_slots=512, block_size=4, trust_modules=(__name__,))


def adapted_modules(model):
    return [module for module in model.modules() if find_adapter(module) is not None]


def test_every_adapter_is_tested():
    used = {
        f"{type(m).__module__}.{type(m).__qualname__}" for name in ADAPTED for m in adapted_modules(make_model(name))
    }
    assert used == set(ADAPTERS)


@pytest.mark.parametrize("name", ADAPTED)
def test_sampled_tokens_scores_and_the_random_state_after_them_equal_native(name):
    options = {"do_sample": True, "top_k": 20, "output_scores": True, "return_dict_in_generate": True}
    model = make_model(name)
    set_seed(3)
    native = model.generate(**{**BATCH, **options})
    drawn = torch.rand(1)
    orca_hf.wrap(model, OrcaConfig(max_slots=512))
    set_seed(3)
    ours = model.generate(**{**BATCH, **options})
    assert torch.equal(ours.sequences, native.sequences)
    torch.testing.assert_close(ours.scores, native.scores, atol=1e-4, rtol=1e-4)
    assert torch.equal(torch.rand(1), drawn)


@pytest.mark.parametrize("name", ADAPTED)
def test_the_returned_cache_is_natives(name):
    """Whatever the pool keeps: a group's K once where natively it is repeated, or a dimension more."""
    model = make_model(name)
    prompt = torch.tensor([PROMPTS[0]])
    options = {"max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True, "use_cache": True}
    native = model.generate(prompt, **options)
    ours = orca_hf.wrap(model, SMALL).generate(prompt, **options)
    caches = [getattr(output, "cache", None) or output.past_key_values for output in (ours, native)]
    for our_layer, layer in zip(caches[0].layers, caches[1].layers, strict=True):
        torch.testing.assert_close(our_layer.keys, layer.keys, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(our_layer.values, layer.values, atol=1e-4, rtol=1e-4)


LONG = [
    ("bloom", {"num_attention_heads": 6}),
    ("mpt", {"num_attention_heads": 6, "max_seq_len": 512}),
    ("falcon:alibi", {"num_attention_heads": 6}),
    ("falcon:alibi", {"num_attention_heads": 6, "attn_implementation": "eager"}),
    ("falcon:alibi", {"num_attention_heads": 6, "multi_query": True}),
    ("gpt_neo", {"window_size": 100, "max_position_embeddings": 512}),
]


@pytest.mark.parametrize(("name", "overrides"), LONG, ids=[f"{name}{list(over)[1:]}" for name, over in LONG])
def test_far_positions_are_natives(name, overrides):
    """Falcon rounds its ALiBi to bfloat16: past some 300 tokens a bias of slope * (j - p) gives other tokens."""
    model = make_model(name, **{"max_position_embeddings": 512, **overrides})
    draw = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 97, (length,), generator=draw).tolist() for length in (330, 90, 3)]
    batch = {**pad_left(prompts), "max_new_tokens": 20, "do_sample": False}
    native = model.generate(**batch)
    orca_hf.wrap(model, OrcaConfig(max_batch_tokens=64, max_slots=1024))
    assert orca_hf.explain(model, **batch).runs_by == "orca"
    assert torch.equal(model.generate(**batch), native)


def test_a_local_layer_forgets_what_is_outside_its_window():
    """Else the test of gpt_neo above could not tell the windows apart."""
    results = [make_model("gpt_neo", window_size=window).generate(**BATCH).tolist() for window in (1, 4, 64)]
    assert results[0] != results[1] != results[2]
    for window in (1, 4, 64):
        model = orca_hf.wrap(make_model("gpt_neo", window_size=window), SMALL)
        assert orca_hf.explain(model).runs_by == "orca"
        assert model.generate(**BATCH).tolist() == results[(1, 4, 64).index(window)]


def in_mid_iteration(monkeypatch, act):
    """Have `act()` called on another thread, once, between the attentions of two layers."""
    adapters = sys.modules["orca_hf.adapters"]
    attend, calls, failures = adapters.attend, [], []

    def guarded():
        try:
            act()
        except BaseException as error:
            failures.append(error)

    def attend_and_act(*args, **kwargs):
        output = attend(*args, **kwargs)
        calls.append(None)
        if len(calls) == 5:
            thread = Thread(target=guarded)
            thread.start()
            thread.join()
        return output

    monkeypatch.setattr(adapters, "attend", attend_and_act)
    return calls, failures


@pytest.mark.parametrize("name", ADAPTED)
def test_a_forward_on_another_thread_in_mid_iteration_is_native(name, monkeypatch):
    model = make_model(name)
    inputs = pad_left(PROMPTS)
    with torch.no_grad():
        expected = model(**inputs).logits
    tokens = model.generate(**BATCH)
    orca_hf.wrap(model, SMALL).generate(**BATCH)
    seen = []

    @torch.no_grad()
    def look():
        assert any(isinstance(module.__dict__.get("forward"), AdaptedForward) for module in model.modules())
        seen.append(model(**inputs).logits)
        modules = tuple(model.modules())
        seen.append(model_reasons(model, modules) + module_reasons(modules, KnownCode((__name__,))))

    calls, failures = in_mid_iteration(monkeypatch, look)
    assert torch.equal(model.generate(**BATCH), tokens)
    assert failures == []
    assert len(calls) > 5
    assert torch.equal(seen[0], expected)
    assert seen[1] == [], "what an iteration changes is not held against the model"


@pytest.mark.parametrize(
    "copying", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"]
)
@pytest.mark.parametrize("name", ["bloom", "falcon:grouped", "mpt"])
def test_a_copy_made_in_mid_iteration_gives_natives_tokens(name, copying, monkeypatch):
    model = make_model(name)
    expected = model.generate(**BATCH)
    orca_hf.wrap(model, SMALL).generate(**BATCH)
    twins = []
    _, failures = in_mid_iteration(monkeypatch, lambda: twins.append(copying(model)))
    assert torch.equal(model.generate(**BATCH), expected)
    assert failures == []
    twin = twins[0]
    assert not any(isinstance(module.__dict__.get("forward"), AdaptedForward) for module in twin.modules())
    assert torch.equal(twin.generate(**BATCH), expected)
    with torch.no_grad():
        adapted_modules(twin)[0].register_forward_pre_hook(lambda module, args: pytest.fail("another model's module"))
    assert torch.equal(model.generate(**BATCH), expected), "a copy's modules are its own"


def test_two_models_over_one_module_may_both_be_in_an_iteration(monkeypatch):
    model = make_model("bloom")
    twin = copy.copy(model)
    twin._modules = dict(model._modules)
    expected = model.generate(**BATCH)
    orca_hf.wrap(model, SMALL).generate(**BATCH)
    twin.__dict__.pop("generate", None)
    orca_hf.wrap(twin, SMALL).generate(**BATCH)
    others = []
    _, failures = in_mid_iteration(monkeypatch, lambda: others.append(twin.generate(**BATCH)))
    assert torch.equal(model.generate(**BATCH), expected)
    assert failures == []
    assert torch.equal(others[0], expected)


def test_a_stand_in_stays_until_the_last_iteration_under_it_ends():
    model = make_model("mpt")
    module = adapted_modules(model)[0]
    first, second = IterationPatches(()), IterationPatches(())
    first.apply(adapt(model.modules()))
    stand_in = module.__dict__["forward"]
    second.apply(adapt(model.modules()))
    first.undo()
    first.undo()
    assert module.__dict__["forward"] is stand_in
    second.undo()
    assert "forward" not in module.__dict__


def test_a_forward_that_the_user_sets_meanwhile_stays_and_one_that_is_there_is_not_overwritten():
    model = make_model("mpt")
    module = adapted_modules(model)[0]
    patches = IterationPatches(())
    patches.apply(adapt(model.modules()))
    module.forward = mine = lambda *args, **kwargs: None
    patches.undo()
    assert module.__dict__["forward"] is mine
    with pytest.raises(UnsupportedError, match="forward of its own"):
        patches.apply(adapt(model.modules()))
    patches.undo()
    assert module.__dict__["forward"] is mine
    assert all("forward" not in other.__dict__ for other in adapted_modules(model)[1:])


@pytest.mark.parametrize("name", ADAPTED)
def test_no_trace_is_left(name):
    def trace(model):
        modules = {path: sorted(module.__dict__) for path, module in model.named_modules()}
        buffers = {path: buffer.shape for path, buffer in model.named_buffers()}
        return modules, buffers, model.config.to_dict(), type(model.config._attn_implementation)

    model = make_model(name)
    before = trace(model)
    orca_hf.wrap(model, SMALL).generate(**BATCH)
    orca_hf.unwrap(model)
    assert trace(model) == before


@pytest.mark.parametrize(("name", "target"), [("bloom", "query_key_value"), ("gpt_neo", "q_proj"), ("mpt", "Wqkv")])
def test_lora_on_an_adapted_modules_projection_is_seen(name, target):
    import peft

    results = []
    for wrapped in (False, True):
        model = make_model(name)
        torch.manual_seed(0)
        adapted = peft.get_peft_model(
            model, peft.LoraConfig(r=4, init_lora_weights=False, target_modules=[target], task_type="CAUSAL_LM")
        )
        if wrapped:
            orca_hf.wrap(adapted, SMALL)
            assert orca_hf.explain(adapted).runs_by == "orca"
        results.append(adapted.generate(**BATCH))
    assert torch.equal(*results)
    assert not torch.equal(results[0], make_model(name).generate(**BATCH))


def outcome(model, **options):
    """Tokens, or the error in their place."""
    try:
        return model.generate(**{**BATCH, **options}).tolist()
    except Exception as error:
        return type(error), str(error)


def patched_class(model, monkeypatch):
    kind = type(adapted_modules(model)[0])
    plain = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, *args, **kwargs: plain(self, *args, **kwargs))


def subclassed(model, monkeypatch):
    for module in adapted_modules(model):
        module.__class__ = type("Mine", (type(module),), {})


def accelerates_hook(model, monkeypatch):
    add_hook_to_module(adapted_modules(model)[0], ModelHook())


def training_attention(model, monkeypatch):
    adapted_modules(model)[0].train()


REFUSED = [
    ("bloom", {}, patched_class, "no adapter"),
    ("falcon:grouped", {}, subclassed, "no adapter"),
    ("gpt_neo", {}, accelerates_hook, "forward of its own"),
    ("bloom", {"pretraining_tp": 2, "slow_but_exact": True}, None, "slow_but_exact"),
    ("bloom", {"attention_dropout": 0.5}, training_attention, "dropout"),
    ("bloom", {"sliding_window": 6}, None, "native cache keeps"),
    ("xglm", {"attention_dropout": 0.5, "dropout": 0.0, "activation_dropout": 0.0}, training_attention, "dropout"),
]


@pytest.mark.parametrize(("name", "overrides", "change", "reason"), REFUSED, ids=[case[3] for case in REFUSED])
@pytest.mark.parametrize("when", ["before the first call", "after it"])
def test_what_an_adapter_would_not_see_goes_native(name, overrides, change, reason, when, monkeypatch, caplog):
    model = orca_hf.wrap(make_model(name, **overrides), SMALL)
    if when == "after it":
        outcome(model)
    if change is not None:
        change(model, monkeypatch)
    set_seed(0)
    ours = outcome(model)
    if not (when == "after it" and change is training_attention):  # which an iteration finds out for itself
        assert reason in str(orca_hf.explain(model))
    assert reason in caplog.text
    orca_hf.unwrap(model)
    set_seed(0)
    assert outcome(model) == ours


@pytest.mark.parametrize("name", ADAPTED)
def test_an_argument_that_changes_the_attention_is_refused(name):
    model = make_model(name)
    forward = adapt(model.modules())[0]
    batch = RaggedBatch.build(query_lens=[3], kv_lens=[3], blocks=[(0,)], block_size=4, device=torch.device("cpu"))
    hidden = torch.randn(1, 3, 48)
    size = 12
    given = {
        "alibi": None,
        "position_embeddings": (torch.ones(1, 3, size), torch.zeros(1, 3, size)),
        "residual": hidden,
    }
    if name.startswith("mpt"):
        given = {"position_bias": None}
    elif name.partition(":")[0] in ("xglm", "gpt_neo"):
        given = {}
    elif not name.startswith("bloom"):
        del given["residual"]
    if name == "gpt_neox_japanese":
        del given["alibi"]
    context = AttentionContext(KVPool(4), batch, num_rows=batch.total_q, tables={})
    with attention_context(context), torch.no_grad(), pytest.raises(UnsupportedError, match="head_mask"):
        forward(hidden, head_mask=torch.ones(4), **given)


@pytest.mark.parametrize("name", ["mpt", "gpt_neo"])
@pytest.mark.parametrize("new", [16, 40])
def test_rows_beyond_a_models_own_tables_end_as_they_do_natively(name, new):
    """These tables count padding too."""
    limits = {"max_seq_len": 24} if name == "mpt" else {"max_position_embeddings": 24}
    batch = {**pad_left([PROMPTS[1], PROMPTS[0]]), "max_new_tokens": new}
    outcomes = []
    for wrapped in (False, True):
        model = make_model(name, **limits)
        if wrapped:
            orca_hf.wrap(model, SMALL)
        outcomes.append(outcome(model, **batch))
    assert outcomes[0] == outcomes[1]


def test_bloom_in_half_precision_goes_native():
    """There its scores hold slope * j in the model's own dtype: another's sums are not native's."""
    model = make_model("bloom").to(torch.bfloat16)
    expected = model.generate(**BATCH)
    orca_hf.wrap(model, SMALL)
    assert "half precision" in str(orca_hf.explain(model))
    assert torch.equal(model.generate(**BATCH), expected)
    model.float()
    assert orca_hf.explain(model).runs_by == "orca"
    assert "half precision" not in str(orca_hf.explain(model))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert "half precision" in str(orca_hf.explain(model))


def test_the_layers_of_a_model_share_their_slopes(monkeypatch):
    """The CPU's plans are known by the slopes' address: one for all layers, not one for each."""
    for name in ("bloom", "mpt"):
        adapters = sys.modules["orca_hf.adapters"]
        attend, seen = adapters.attend, set()

        def note(*args, attend=attend, seen=seen, **kwargs):
            seen.add(kwargs["alibi_slopes"].data_ptr())
            return attend(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(adapters, "attend", note)
            orca_hf.wrap(make_model(name), SMALL).generate(**BATCH)
        assert len(seen) == 1


def test_a_module_outside_an_iteration_runs_its_own_forward():
    model = make_model("bloom")
    module = adapted_modules(model)[0]
    stand_in = adapt(model.modules())[0]
    assert isinstance(module, nn.Module) and stand_in.module is module
    hidden = torch.randn(2, 3, 48)
    alibi = torch.zeros(8, 1, 3)
    with torch.no_grad():
        expected = module(hidden, hidden, alibi=alibi, attention_mask=None)
        ours = stand_in(hidden, hidden, alibi=alibi, attention_mask=None)
    assert torch.equal(ours[0], expected[0])
    assert torch.equal(ours[1], expected[1])


NUMBERS = {
    "falcon:alibi": ["inv_norm_factor", "beta"],
    "falcon:alibi_grouped": ["inv_norm_factor", "beta"],
    "falcon:grouped": ["inv_norm_factor"],
    "bloom": ["inv_norm_factor", "beta"],
    "mpt": ["softmax_scale"],
    "mpt:options": ["clip_qkv", "softmax_scale"],
    "xglm": ["scaling"],
    "gpt_neox_japanese": ["norm_factor"],
}


@pytest.mark.parametrize("when", ["before the first call", "after it"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", NUMBERS)
def test_the_numbers_of_a_module_are_those_of_now(name, implementation, when):
    for number in NUMBERS[name]:
        plain, model = make_model(name), make_model(name)
        for each in (plain, model):
            if name.startswith("falcon"):
                each.config._attn_implementation = implementation
        orca_hf.wrap(model, SMALL)
        if when == "after it":
            model.generate(**BATCH)
        changed = 0
        for each in (plain, model):
            for module in each.modules():
                if number in module.__dict__:
                    setattr(module, number, getattr(module, number) * 0.5)
                    changed += 1
        assert changed
        assert torch.equal(model.generate(**BATCH), plain.generate(**BATCH)), number
        assert orca_hf.explain(model).runs_by == "orca"
