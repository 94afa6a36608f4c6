"""Promise: the cache that a call returns is native's, and a next turn on it gives native's tokens."""

import pytest
import torch
from oracle import make_twins
from tiny import PROMPTS, pad_left
from transformers import DynamicCache

from orca_hf.runner import CACHE_FIELD

OPTIONS = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}


def padded(prompts, width):
    rows = [[0] * (width - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(mask)}


BATCHES = {
    "one row is as long as the batch": pad_left(PROMPTS),
    "every row is padded": padded([[5, 6, 7, 8], [9, 10, 11]], 8),
    "every row is padded, to a multiple": padded(PROMPTS, 16),
    "one padded row": padded([[5, 6, 7, 8]], 9),
    "one row": {"input_ids": torch.tensor([[5, 6, 7, 8]])},
    "several answers of a padded row": {**padded([[5, 6, 7]], 6), "num_return_sequences": 3, "num_beams": 1},
}


@pytest.mark.parametrize("model_type", ["llama", "mistral", "gemma3_text", "gpt2", "bloom"])
@pytest.mark.parametrize("name", BATCHES)
def test_a_second_turn_goes_on_as_natively(name, model_type):
    native, ours = make_twins(model_type=model_type)
    call = {**BATCHES[name], **OPTIONS}
    if "num_return_sequences" in call:
        call |= {"do_sample": True}
    outputs = []
    for model in (native, ours):
        torch.manual_seed(0)
        first = model.generate(**call)
        cache = first[CACHE_FIELD]
        assert isinstance(cache, DynamicCache)
        length = cache.get_seq_length()
        sequences = first.sequences
        grown = torch.cat([sequences, torch.full((len(sequences), 2), 17)], dim=1)
        mask = call.get("attention_mask", torch.ones_like(call["input_ids"]))
        mask = mask.repeat_interleave(call.get("num_return_sequences", 1), dim=0)
        mask = torch.nn.functional.pad(mask, (0, grown.shape[1] - mask.shape[1]), value=1)
        second = model.generate(grown, attention_mask=mask, max_new_tokens=6, do_sample=False, **{CACHE_FIELD: cache})
        outputs.append((length, sequences.tolist(), second.tolist()))
    assert outputs[0] == outputs[1]
