"""Promise: code of a user's own in a model acts on a batch as natively, or is vouched for and runs by Orca."""

import functools

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, ModelHook, SequentialHook, add_hook_to_module
from oracle import num_iterations
from tiny import PROMPTS, make_model, pad_left
from torch import nn
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

import orca_hf
from orca_hf import ConfigError, OrcaConfig

CONFIG = OrcaConfig(max_slots=512)
BATCH = {**pad_left(PROMPTS), "max_new_tokens": 12, "do_sample": False}


def last_differs(y):
    y = y.clone()
    y[:, -1] += 0.5
    return y


def one_differs(y):
    return y + 0.5 if y.shape[1] == 1 else y


class Around(nn.Module):
    def __init__(self, inner, change):
        super().__init__()
        self.inner = inner
        self.change = change

    def forward(self, x):
        return self.change(self.inner(x))


class OwnMLP(LlamaMLP):
    def forward(self, x):
        return last_differs(super().forward(x))


class OwnHook(ModelHook):
    def post_forward(self, module, output):
        return last_differs(output)


class OwnAlign(AlignDevicesHook):
    def post_forward(self, module, output):
        return last_differs(super().post_forward(module, output))


def mlp(model):
    return model.model.layers[0].mlp


def around(change):
    def put(model, patch):
        model.model.layers[0].mlp = Around(mlp(model), change)

    return put


def hooked(make):
    def put(model, patch):
        add_hook_to_module(mlp(model), make())

    return put


def own_class(model, patch):
    mlp(model).__class__ = OwnMLP


def patched_hook(model, patch):
    hook = AlignDevicesHook()
    hook.post_forward = lambda module, output: last_differs(output)
    add_hook_to_module(mlp(model), hook)


def class_forward(change, wraps=False):
    def put(model, patch):
        plain = LlamaMLP.forward

        def forward(self, x):
            return change(plain(self, x))

        patch.setattr(LlamaMLP, "forward", functools.wraps(plain)(forward) if wraps else forward)

    return put


def class_method(model, patch):
    plain = LlamaRMSNorm.forward
    patch.setattr(LlamaRMSNorm, "__call__", lambda self, x: last_differs(plain(self, x)), raising=False)


def decorated(model, patch):
    plain = LlamaMLP.forward

    @torch.no_grad()
    def forward(self, x):
        return last_differs(plain(self, x))

    patch.setattr(LlamaMLP, "forward", forward)


def function_of_file(model, patch):
    plain = nn.functional.silu
    patch.setattr(nn.functional, "silu", lambda x, inplace=False: last_differs(plain(x)))


def rotation_of_file(model, patch):
    import transformers.models.llama.modeling_llama as file

    plain = file.apply_rotary_pos_emb

    def rotate(q, k, cos, sin, unsqueeze_dim=1):
        q, k = plain(q, k, cos, sin, unsqueeze_dim)
        return (q * 2, k) if q.shape[2] == 1 else (q, k)

    patch.setattr(file, "apply_rotary_pos_emb", rotate)


def own_activation(model, patch):
    mlp(model).act_fn = Around(mlp(model).act_fn, last_differs)


OWN = {
    "a module around one, at its last position": around(last_differs),
    "a module around one, where there is one token": around(one_differs),
    "a subclass": own_class,
    "an activation": own_activation,
    "accelerate's hook, a class of one's own": hooked(OwnHook),
    "accelerate's hook, a subclass of its own": hooked(OwnAlign),
    "accelerate's hook, one among several": hooked(lambda: SequentialHook(AlignDevicesHook(), OwnHook())),
    "accelerate's hook, a method replaced": patched_hook,
    "a class's forward": class_forward(last_differs),
    "a class's forward, where there is one token": class_forward(one_differs),
    "a class's forward, under its name": class_forward(last_differs, wraps=True),
    "a class's forward, decorated by PyTorch": decorated,
    "a class's call": class_method,
    "a function of PyTorch": function_of_file,
    "a function of the model's file": rotation_of_file,
}


def is_shared(name):
    """Whether it is put into both models at once, and taken back."""
    return name.startswith(("a class's", "a function"))


@pytest.mark.parametrize("when", ["before the first call", "after it"])
@pytest.mark.parametrize("name", OWN)
def test_code_of_ones_own_sees_batches(name, when, monkeypatch):
    plain, model = make_model(), orca_hf.wrap(make_model(), CONFIG)
    without = plain.generate(**BATCH)
    if when == "after it":
        assert torch.equal(model.generate(**BATCH), without)
    with monkeypatch.context() as patch:
        OWN[name](plain, patch)
        if not is_shared(name):
            OWN[name](model, patch)
        native = plain.generate(**BATCH)
        assert not torch.equal(native, without), "or this case shows nothing"
        assert torch.equal(model.generate(**BATCH), native)
        assert orca_hf.explain(model).runs_by == "native"
    if is_shared(name):
        assert torch.equal(model.generate(**BATCH), without)
        assert orca_hf.explain(model).runs_by == "orca"


class Scaled(nn.Module):
    """Treats each token by itself."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) * 1.5


@pytest.mark.parametrize("name", [__name__, __name__.rpartition(".")[0] or __name__])
def test_what_is_vouched_for_runs_by_orca(name):
    plain, model = make_model(), make_model()
    for each in (plain, model):
        each.model.layers[0].mlp = Scaled(mlp(each))
    orca_hf.wrap(model, OrcaConfig(max_slots=512, trust_modules=(name,)))
    assert torch.equal(model.generate(**BATCH), plain.generate(**BATCH))
    assert num_iterations(model) > 0
    orca_hf.wrap(model, OrcaConfig(max_slots=512, trust_modules=("somebody.elses",)))
    assert "Scaled is code of your own" in str(orca_hf.explain(model))
    assert "trust_modules" in str(orca_hf.explain(model))


@pytest.mark.parametrize("hook", [AlignDevicesHook, lambda: SequentialHook(AlignDevicesHook())], ids=["one", "several"])
def test_accelerates_own_hooks_run_by_orca(hook):
    plain, model = make_model(), orca_hf.wrap(make_model(), CONFIG)
    for each in (plain, model):
        add_hook_to_module(mlp(each), hook())
    assert torch.equal(model.generate(**BATCH), plain.generate(**BATCH))
    assert orca_hf.explain(model).runs_by == "orca"


@pytest.mark.parametrize("wrong", ["my_project", ["my_project"], (1,), ("",), None])
def test_what_is_no_tuple_of_names_is_refused(wrong):
    with pytest.raises(ConfigError, match=r"trust_modules is .* must be a tuple"):
        OrcaConfig(trust_modules=wrong)
