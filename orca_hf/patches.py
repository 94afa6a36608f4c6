"""What is changed in the user's model for the length of an iteration, and undone after it.

Plain attribute writes on modules and configs, microseconds each way. Between iterations the model is the user's.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import Lock
from weakref import WeakKeyDictionary

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from orca_hf.attention import orca_attention
from orca_hf.packed_linear import Forwards


def attention_configs(modules: Iterable[nn.Module]) -> tuple[PretrainedConfig, ...]:
    """Every config object that one of a model's `modules` reads its attention implementation from, parents first."""
    found: dict[int, PretrainedConfig] = {}
    for module in modules:
        config = module.__dict__.get("config")
        if isinstance(config, PretrainedConfig):
            found.setdefault(id(config), config)
    return tuple(found.values())


# A model is changed by one iteration at a time, whoever runs it: another engine under autocast, or the engine of a
# wrapping that has just been replaced.
_locks: WeakKeyDictionary[PreTrainedModel, Lock] = WeakKeyDictionary()
_locks_lock = Lock()


def model_lock(model: PreTrainedModel) -> Lock:
    """The lock to hold around `iteration_patches` and the forward."""
    with _locks_lock:
        return _locks.setdefault(model, Lock())


@contextmanager
def iteration_patches(configs: tuple[PretrainedConfig, ...], forwards: Forwards) -> Iterator[None]:
    """Switch the model to Orca's attention, and modules to the given forwards, within the block."""
    patched: list[nn.Module] = []
    with orca_attention(configs):
        try:
            for linear, forward in forwards:
                if "forward" in linear.__dict__:
                    continue  # another model over the same module is in an iteration of its own
                # nn.Module.__setattr__ would look the name up among parameters and buffers first: ten times slower.
                linear.__dict__["forward"] = forward
                patched.append(linear)
            yield
        finally:
            for module in patched:
                module.__dict__.pop("forward", None)
