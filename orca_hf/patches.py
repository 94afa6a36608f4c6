"""What is changed in the user's model for the length of an iteration, and undone after it.

Plain attribute writes on modules and configs, microseconds each way. Between iterations the model is the user's.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from orca_hf.attention_name import orca_attention, restore_attention
from orca_hf.errors import UnsupportedError


def all_modules(model: nn.Module) -> tuple[nn.Module, ...]:
    """What `model.modules()` lists, in a quarter of its time: every call asks for it."""
    found = {model: None}

    def visit(module: nn.Module) -> None:
        for child in module._modules.values():
            if child is not None and child not in found:
                found[child] = None
                if child._modules:
                    visit(child)

    visit(model)
    return tuple(found)


def attention_configs(modules: Iterable[nn.Module]) -> tuple[PretrainedConfig, ...]:
    """Every config object that one of a model's `modules` reads its attention implementation from, parents first."""
    found: dict[int, PretrainedConfig] = {}
    for module in modules:
        config = module.__dict__.get("config")
        if isinstance(config, PretrainedConfig):
            found.setdefault(id(config), config)
    return tuple(found.values())


class StandIn:
    """A callable in the place of a module's forward, for the length of an iteration.

    Another thread may run the model in the middle of an iteration, copy it or pickle it. So a stand-in does what the
    module's own forward does wherever it is not for it to do otherwise, and a copy of it *is* the module's own forward.

    Args:
        module: The module in which it stands.
    """

    __slots__ = ("module", "uses")

    optional = True  # the iteration is right without it, only slower

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.uses = 0  # iterations that run under it: models may share a module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward."""
        return type(self.module).forward(self.module, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (type(self.module).forward, self.module)


# A model is changed by one iteration at a time, whoever runs it: another engine under autocast, or the engine of a
# wrapping that has just been replaced.
_locks: WeakKeyDictionary[PreTrainedModel, Lock] = WeakKeyDictionary()
_locks_lock = Lock()
# Held while forwards are exchanged: models of several engines may share a module.
_exchanging = Lock()
if hasattr(os, "register_at_fork"):
    # A child has none of the threads that hold one of the locks.
    for _lock in (_locks_lock, _exchanging):
        os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)
    os.register_at_fork(after_in_child=_locks.clear)


def model_lock(model: PreTrainedModel) -> Lock:
    """The lock to hold around `iteration_patches` and the forward."""
    with _locks_lock:
        return _locks.setdefault(model, Lock())


@contextmanager
def iteration_patches(configs: tuple[PretrainedConfig, ...], stand_ins: Iterable[StandIn]) -> Iterator[None]:
    """Switch the model to Orca's attention, and modules to their stand-ins, within the block.

    Raises:
        UnsupportedError: A forward of the user's is where a stand-in must be.
    """
    standing: list[StandIn] = []
    with orca_attention(configs):
        try:
            with _exchanging:
                for stand_in in stand_ins:
                    # nn.Module.__setattr__ would look the name up among parameters and buffers first: ten times slower.
                    found = stand_in.module.__dict__.setdefault("forward", stand_in)
                    if isinstance(found, StandIn):
                        found.uses += 1
                        standing.append(found)
                    elif not stand_in.optional:
                        raise UnsupportedError(f"a {type(stand_in.module).__name__} has a forward of its own")
            yield
        finally:
            with _exchanging:
                for stand_in in standing:
                    stand_in.uses -= 1
                    own = stand_in.module.__dict__
                    # A forward that the user has set meanwhile stays.
                    if stand_in.uses == 0 and own.get("forward") is stand_in:
                        del own["forward"]


def undo_patches(model: PreTrainedModel) -> None:
    """Undo what iterations of threads that a fork left behind have changed; in the child, where they never end."""
    modules = all_modules(model)
    restore_attention(attention_configs(modules))
    for module in modules:
        if isinstance(module.__dict__.get("forward"), StandIn):
            del module.__dict__["forward"]
