"""Promise: a model of custom code is tried before it is trusted, and goes native, with a warning, where it differs."""

import pytest
import torch
from tiny import PROMPTS, make_model, pad_left
from torch import nn
from transformers import GenerationMixin, LlamaConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import orca_hf
from orca_hf import OrcaConfig

# The promise is about what is vouched for: other code of a user's own is not even tried.
VOUCHED = OrcaConfig(trust_modules=(__name__,))


class OwnAttention(nn.Module):
    """Attention of one head over its input's batch; through the interface, or written out."""

    def __init__(self, config, uses_interface):
        super().__init__()
        self.config = config
        self.uses_interface = uses_interface
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)

    def forward(self, hidden, position_ids):
        query, key, value = self.qkv(hidden).chunk(3, dim=-1)
        if self.uses_interface:
            attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, None)
            heads = (each.unsqueeze(1) for each in (query, key, value))
            mask = None if self.config._attn_implementation == "orca" else torch.ones(hidden.shape[1], hidden.shape[1])
            mask = None if mask is None else mask.tril().bool()
            return attend(self, *heads, mask)[0].flatten(2)
        scores = query @ key.transpose(1, 2) / hidden.shape[-1] ** 0.5
        hidden_ones = torch.ones_like(scores).triu(1).bool()
        return scores.masked_fill(hidden_ones, float("-inf")).softmax(dim=-1) @ value


class OddModel(PreTrainedModel, GenerationMixin):
    """A decoder without a cache, as custom code may be: it says that it is on the attention interface."""

    config_class = LlamaConfig
    _supports_attention_backend = True
    _supports_sdpa = True
    uses_interface = (False, False)

    def __init__(self, config):
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.attention = nn.ModuleList(OwnAttention(config, uses) for uses in self.uses_interface)
        self.head = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def get_input_embeddings(self):
        return self.embedding

    def forward(self, input_ids, position_ids=None, attention_mask=None, **kwargs):
        hidden = self.embedding(input_ids) + self.position(position_ids)
        for attention in self.attention:
            hidden = hidden + attention(hidden, position_ids)
        return CausalLMOutputWithPast(logits=self.head(hidden))


class HalfOddModel(OddModel):
    uses_interface = (True, False)


class HonestModel(OddModel):
    uses_interface = (True, True)


class RaisingModel(HonestModel):
    def forward(self, input_ids, position_ids=None, attention_mask=None, **kwargs):
        if (position_ids.diff() != 1).any():
            raise ValueError("these positions are not those of one row")
        return super().forward(input_ids, position_ids, attention_mask, **kwargs)


def make_odd(cls):
    torch.manual_seed(0)
    model = cls(LlamaConfig(vocab_size=97, hidden_size=32, max_position_embeddings=64, num_hidden_layers=2)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.5)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (OddModel, "none of its modules calls the registered attention function"),
        (HalfOddModel, "logits differ from the native forward"),
        (RaisingModel, "a trial iteration raised ValueError: these positions"),
    ],
)
def test_an_odd_model_goes_native_with_a_warning(cls, reason, caplog):
    model = make_odd(cls)
    made = {"inputs": torch.tensor([PROMPTS[0]]), "max_new_tokens": 8, "do_sample": False, "use_cache": False}
    native = model.generate(**made)
    orca_hf.wrap(model, VOUCHED)
    for _ in range(2):
        assert torch.equal(model.generate(**made), native)
    assert reason in str(orca_hf.explain(model, **made))
    assert caplog.text.count(reason) == 1


def test_an_honest_model_of_custom_code_runs_by_orca_when_it_is_vouched_for():
    model = make_odd(HonestModel)
    made = {"inputs": torch.tensor([PROMPTS[0]]), "max_new_tokens": 8, "do_sample": False, "use_cache": False}
    native = model.generate(**made)
    orca_hf.wrap(model)
    assert torch.equal(model.generate(**made), native)
    assert "is code of your own" in str(orca_hf.explain(model))
    orca_hf.wrap(model, VOUCHED)
    assert torch.equal(model.generate(**made), native)
    assert model.generate.engines[0].stats.num_iterations == 8


def test_a_trial_that_raised_once_is_tried_again(monkeypatch):
    """What was raised may pass, as a lack of memory does."""
    model = make_model()
    batch = {**pad_left(PROMPTS), "max_new_tokens": 4, "do_sample": False}
    native = model.generate(**batch)
    orca_hf.wrap(model)
    with monkeypatch.context() as patch:
        patch.setattr("orca_hf.engines.try_out", lambda runner: 1 / 0)
        assert torch.equal(model.generate(**batch), native)
        assert "ZeroDivisionError" in str(orca_hf.explain(model))
    assert torch.equal(model.generate(**batch), native)
    assert orca_hf.explain(model).runs_by == "orca"
