"""Native generate() as the oracle: run the same call on twins, and compare all that comes out."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tiny import make_model
from torch import Tensor
from transformers import Cache, PreTrainedModel

import orca_hf
from orca_hf import OrcaConfig

# So small that rows wait for each other, prompts are cut into chunks, and a call needs several blocks.
SMALL = OrcaConfig(max_batch_size=3, max_batch_tokens=7, max_slots=256, block_size=4)

Twins = tuple[PreTrainedModel, PreTrainedModel]


def make_twins(config: OrcaConfig = SMALL, model_type: str = "llama", **overrides: object) -> Twins:
    """A plain model, and a wrapped one of the same weights."""
    return make_model(model_type, **overrides), orca_hf.wrap(make_model(model_type, **overrides), config)


@dataclass(frozen=True)
class Outcome:
    """What became of a call: its result or its error, and the next number of the default generator."""

    result: Any
    next_random: float


def outcome(call: Callable[[], Any], seed: int = 0) -> Outcome:
    """The outcome of `call` after `torch.manual_seed(seed)`."""
    torch.manual_seed(seed)
    try:
        result = call()
    except Exception as error:
        result = error
    return Outcome(result, torch.rand(1, dtype=torch.float32, device="cpu").item())


def num_iterations(model: PreTrainedModel) -> int:
    """Iterations that a wrapped model's engines have run: they grow when, and only when, Orca runs a call."""
    return sum(engine.stats.num_iterations for engine in model.generate.engines)


def assert_same(native: Any, ours: Any, atol: float = 1e-4) -> None:
    """Types, fields, shapes, dtypes, devices and modes are equal, and so are tokens, errors and, nearly, scores."""
    assert type(ours) is type(native), (native, ours)
    if isinstance(native, Exception):
        assert str(ours) == str(native)
    elif isinstance(native, Tensor):
        _assert_same_tensors(native, ours, atol)
    elif isinstance(native, Cache):
        assert ours.get_seq_length() == native.get_seq_length()
        for ours_layer, native_layer in zip(ours.layers, native.layers, strict=True):
            assert type(ours_layer) is type(native_layer)
            for name in ("keys", "values"):
                _assert_same_kind(getattr(native_layer, name), getattr(ours_layer, name))
    elif isinstance(native, dict):
        assert list(ours) == list(native)
        for name, value in native.items():
            assert_same(value, ours[name], atol)
    elif isinstance(native, tuple | list):
        for native_item, ours_item in zip(native, ours, strict=True):
            assert_same(native_item, ours_item, atol)
    else:
        assert ours == native


def _assert_same_tensors(native: Tensor, ours: Tensor, atol: float) -> None:
    _assert_same_kind(native, ours)
    if native.is_floating_point():
        torch.testing.assert_close(ours, native, atol=atol, rtol=1e-4)
    else:
        assert torch.equal(ours, native), (native, ours)


def _assert_same_kind(native: Tensor, ours: Tensor) -> None:
    def kind(tensor: Tensor) -> tuple[Any, ...]:
        return tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad, tensor.is_inference()

    assert kind(ours) == kind(native)


def assert_same_outcome(twins: Twins, call: Callable[[PreTrainedModel], Any], seed: int = 0) -> Outcome:
    """Run `call` on both; return the native outcome."""
    native, ours = (outcome(lambda model=model: call(model), seed) for model in twins)
    assert_same(native.result, ours.result)
    assert ours.next_random == native.next_random, "the default generator is left where native leaves it"
    return native
