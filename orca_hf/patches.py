"""What is changed in the user's model for the length of an iteration, and undone after it.

Plain attribute writes on modules and configs, microseconds each way. Between iterations the model is the user's. Each
write is noted before it is made, and can be undone twice, so that an interruption anywhere leaves nothing behind.
"""

import os
from collections.abc import Iterable
from functools import partial
from threading import RLock
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from orca_hf.attention_name import NAMING, name_orca, name_users, restore_attention
from orca_hf.errors import UnsupportedError

if TYPE_CHECKING:
    from orca_hf.interruption import Lock


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

    __slots__ = ("module", "users")

    optional = True  # the iteration is right without it, only slower

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.users: set[int] = set()  # who runs iterations under it: models may share a module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward."""
        return type(self.module).forward(self.module, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (type(self.module).forward, self.module)


# A model is changed by one iteration at a time, whoever runs it: another engine under autocast, or the engine of a
# wrapping that has just been replaced.
_locks: WeakKeyDictionary[PreTrainedModel, "Lock"] = WeakKeyDictionary()
_locks_lock = RLock()
# Held while forwards are exchanged: models of several engines may share a module.
_exchanging = RLock()
if hasattr(os, "register_at_fork"):
    # A child has none of the threads that hold one of the locks.
    for _lock in (_locks_lock, _exchanging):
        os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)
    os.register_at_fork(after_in_child=_locks.clear)


def model_lock(model: PreTrainedModel) -> "Lock":
    """The lock to hold around a forward of `model` that is not to meet an iteration's."""
    with _locks_lock:
        found: Lock = _locks.get(model)
        if found is None:
            found = _locks[model] = RLock()
        return found


def forget_lock(model: PreTrainedModel) -> None:
    """Have the next who asks get a new lock: the thread that holds this one has left."""
    with _locks_lock:
        _locks.pop(model, None)


def patching_locks(model: PreTrainedModel) -> tuple["Lock", ...]:
    """Every lock that a thread takes while it runs an iteration on `model`."""
    return model_lock(model), _locks_lock, _exchanging, NAMING


class IterationPatches:
    """What one runner's iterations change in a model: its attention's name, and the forwards of some modules.

    Args:
        configs: Of the model, its own before its parts'.
    """

    def __init__(self, configs: tuple[PretrainedConfig, ...]) -> None:
        self._configs = configs
        self._standing: list[StandIn] = []

    def apply(self, stand_ins: Iterable[StandIn]) -> None:
        """Switch the model to Orca's attention, and modules to their stand-ins; `undo` must follow, also an error.

        Raises:
            UnsupportedError: A forward of the user's is where a stand-in must be.
        """
        name_orca(self._configs, self)
        with _exchanging:
            for stand_in in stand_ins:
                # nn.Module.__setattr__ would look the name up among parameters and buffers first: ten times slower.
                found = stand_in.module.__dict__.get("forward", stand_in)
                if isinstance(found, StandIn):
                    self._standing.append(found)  # before it stands, so that it is undone wherever this ends
                    found.users.add(id(self))
                    found.module.__dict__.setdefault("forward", found)
                elif not stand_in.optional:
                    raise UnsupportedError(f"a {type(stand_in.module).__name__} has a forward of its own")

    def undo(self) -> None:
        """Leave the model as it is the user's; does nothing where there is nothing to undo."""
        with _exchanging:
            for stand_in in self._standing:
                stand_in.users.discard(id(self))
                own = stand_in.module.__dict__
                # A forward that the user has set meanwhile stays.
                if not stand_in.users and own.get("forward") is stand_in:
                    del own["forward"]
            self._standing.clear()
        name_users(self._configs, self)


def undo_patches(model: PreTrainedModel) -> None:
    """Undo what iterations of threads that a fork left behind have changed; in the child, where they never end."""
    modules = all_modules(model)
    restore_attention(attention_configs(modules))
    for module in modules:
        if isinstance(module.__dict__.get("forward"), StandIn):
            del module.__dict__["forward"]
