"""Promise: whatever causal language model type of transformers is wrapped, generate() gives what native gives."""

from collections.abc import Callable

import pytest
import torch
from tiny import PROMPTS, pad_left
from tiny_architectures import MODEL_TYPES, make_tiny
from transformers import PreTrainedModel

import orca_hf
from orca_hf import OrcaConfig

# Requests are cut into chunks, interleaved and queued.
CONFIG = OrcaConfig(max_batch_size=3, max_batch_tokens=5, max_slots=512, block_size=4)

ORCA = frozenset()
NATIVE: dict[str, str] = {}

PADDED = pad_left(PROMPTS)
INPUTS = {"together": PADDED}
INPUTS |= {f"row {row}": {name: value[row : row + 1] for name, value in PADDED.items()} for row in range(len(PROMPTS))}
INPUTS |= {f"unpadded {row}": {"input_ids": torch.tensor([prompt])} for row, prompt in enumerate(PROMPTS)}
OPTIONS = {"greedy": {"max_new_tokens": 16, "do_sample": False}, "sampled": {"max_new_tokens": 8, "do_sample": True}}


def test_every_type_is_decided():
    assert not set(MODEL_TYPES) - ORCA - set(NATIVE)
    assert not ORCA & set(NATIVE)


def outcome(model: PreTrainedModel, inputs: str, options: str) -> torch.Tensor | Exception:
    torch.manual_seed(7)
    try:
        return model.generate(**INPUTS[inputs], **OPTIONS[options])
    except Exception as error:
        return error


def same(ours: torch.Tensor | Exception, native: torch.Tensor | Exception) -> bool:
    if isinstance(native, Exception):
        return type(ours) is type(native)
    return isinstance(ours, torch.Tensor) and ours.dtype == native.dtype and torch.equal(ours, native)


def runs_by(model: PreTrainedModel) -> tuple[str, str]:
    """How the wrapped `model` runs PADDED, and why not by Orca."""
    explanation = orca_hf.explain(model, **PADDED, **OPTIONS["greedy"])
    return explanation.runs_by, "; ".join(explanation.reasons).replace(f"{type(model).__name__} cannot be run by Orca: ", "")


def num_iterations(model: PreTrainedModel) -> int:
    return sum(engine.num_iterations for engine in orca_hf.explain(model).engines)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_generate_is_native_generate(model_type, record_property):
    model = make_tiny(model_type)
    calls = [(inputs, options) for options in OPTIONS for inputs in INPUTS]
    native = {call: outcome(model, *call) for call in calls}
    orca_hf.wrap(model, CONFIG)
    how, reason = runs_by(model)
    before = num_iterations(model)
    ours = {call: outcome(model, *call) for call in calls}
    differing = [" ".join(call) for call in calls if not same(ours[call], native[call])]
    raised = {type(each).__name__ for each in native.values() if isinstance(each, Exception)}
    tokens = f"differ: {', '.join(differing)}" if differing else "equal"
    if raised:
        tokens += f" (native raises {', '.join(sorted(raised))})"
    record_property("architectures", {"type": model_type, "runs by": how, "reason": reason, "tokens": tokens})
    assert not differing
    iterations = num_iterations(model) - before
    assert iterations > 0 if how != "native" else iterations == 0
    first = native["together", "greedy"]
    if not raised:
        assert len(set(first[:, -16:].flatten().tolist())) > 4, "the model repeats itself: too weak an oracle"
    if model_type in NATIVE:
        assert how == "native"
        assert NATIVE[model_type] in reason
    else:
        assert how != "native", reason
