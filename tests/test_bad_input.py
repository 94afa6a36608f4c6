"""Promise: bad input gets native's error or a clear one, and nothing is lost."""

import pytest
import torch
from tiny import PROMPTS, VOCAB, make_model, pad_left

import orca_hf
from orca_hf import CapacityError, OrcaConfig, TokenIdError


@pytest.fixture(scope="module")
def twins():
    config = OrcaConfig(max_batch_size=2, max_batch_tokens=8, max_slots=64, block_size=8)
    return make_model(), orca_hf.wrap(make_model(), config)


def outcome(call):
    torch.manual_seed(0)
    try:
        return call()
    except Exception as error:
        return error


CASES = {
    "empty prompt": {"input_ids": torch.zeros((1, 0), dtype=torch.long)},
    "no rows": {"input_ids": torch.zeros((0, 3), dtype=torch.long)},
    "token id too large": {"input_ids": torch.tensor([[5, VOCAB]])},
    "token id negative": {"input_ids": torch.tensor([[5, -3]])},
    "a bad row among good ones": {"input_ids": torch.tensor([[5, 6], [7, 99999], [8, 9]])},
    "max_new_tokens 0": {"max_new_tokens": 0},
    "max_new_tokens negative": {"max_new_tokens": -1},
    "max_length below the prompt": {"max_new_tokens": None, "max_length": 2},
    "mask too short": {"attention_mask": torch.ones(1, 3)},
    "mask too long": {"attention_mask": torch.ones(1, 30)},
    "mask with other rows": {"attention_mask": torch.ones(2, 11)},
    "mask of one dimension": {"attention_mask": torch.ones(11)},
    "mask of four dimensions": {"attention_mask": torch.ones(1, 1, 11, 11)},
    "mask with holes": {"attention_mask": torch.tensor([[1, 0, 1, 1, 1, 1, 0, 1, 1, 1, 1]])},
    "mask of other values": {"attention_mask": torch.tensor([[3] * 11])},
    "another device": {"input_ids": torch.zeros((1, 3), dtype=torch.long, device="meta")},
    "float ids": {"input_ids": torch.tensor([[5.0, 6.0]])},
    "pad outside the vocabulary": {**pad_left(PROMPTS), "pad_token_id": VOCAB, "eos_token_id": list(range(3, 60))},
    "16-bit ids": {"input_ids": torch.tensor([[5, 6]], dtype=torch.int16)},
    "temperature 0": {"do_sample": True, "temperature": 0.0},
    "top_p 2": {"do_sample": True, "top_p": 2.0},
    "unknown argument": {"no_such_argument": 3},
}


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_answered_as_natively(twins, name):
    made = {"input_ids": torch.tensor([PROMPTS[0]]), "max_new_tokens": 4, "do_sample": False, **CASES[name]}
    native, ours = (outcome(lambda model=model: model.generate(**made)) for model in twins)
    if isinstance(native, Exception):
        assert isinstance(ours, type(native)), (ours, native)
    else:
        assert torch.equal(ours, native)
    good = {**pad_left(PROMPTS), "max_new_tokens": 6, "do_sample": False}
    assert torch.equal(twins[1].generate(**good), twins[0].generate(**good)), "the next call is served"
    assert twins[1].generate.engines[0].stats.num_reserved == 0


def test_a_token_id_outside_the_vocabulary_is_named(twins):
    with pytest.raises(TokenIdError, match=r"Row 1 has token id 99999.*0 to 96"):
        twins[1].generate(torch.tensor([[5, 6], [7, 99999]]), max_new_tokens=2)


def test_a_request_over_the_pool_is_refused_with_the_numbers(twins):
    with pytest.raises(CapacityError, match=r"prompt 11 \+ max_new_tokens 90 needs 100 slots, the pool has 64"):
        twins[1].generate(torch.tensor([PROMPTS[0]]), max_new_tokens=90)
    assert twins[1].generate.engines[0].stats.num_waiting == 0


def test_positions_beyond_a_learned_table_fail_as_natively():
    native, ours = make_model("gpt2"), orca_hf.wrap(make_model("gpt2"))
    made = {"inputs": torch.tensor([PROMPTS[0]]), "max_new_tokens": 125, "do_sample": False}
    expected = outcome(lambda: native.generate(**made))
    assert isinstance(expected, IndexError)
    assert isinstance(outcome(lambda: ours.generate(**made)), IndexError)


def test_memory_too_small_for_one_block_is_an_error_with_the_numbers(monkeypatch):
    monkeypatch.setattr("orca_hf.kv_pool.free_memory", lambda device: 1000)
    model = orca_hf.wrap(make_model(), OrcaConfig(memory_fraction=0.25))
    with pytest.raises(CapacityError, match=r"25% of the free memory of cpu is 250 bytes"):
        model.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=2)
