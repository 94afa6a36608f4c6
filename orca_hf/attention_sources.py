"""Whether the attention that Orca's stands for is still PyTorch's and transformers' own.

An iteration runs none of it, so nothing that somebody has put in its place would be heard of there.
"""

import sys
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from transformers import PretrainedConfig, masking_utils

from orca_hf.adapters import find_adapter
from orca_hf.attention_name import user_implementation
from orca_hf.batch_invariance import BatchInvariantProducts
from orca_hf.same_code import Snapshot, is_original

_EAGER = "eager_attention_forward"


def mode_reasons() -> list[str]:
    """Why this thread's modes speak against Orca: one of the user's sees operations that Orca does not run, or others.

    PyTorch's own for a default device does not.
    """
    modes = [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]
    names = {type(mode).__name__ for mode in modes if not isinstance(mode, DeviceContext | BatchInvariantProducts)}
    return [f"the call is made under {', '.join(sorted(names))}, which looks at every operation"] if names else []


def attention_reasons(modules: Iterable[nn.Module]) -> list[str]:
    """Why Orca's attention may not be that of a model of these `modules`: a part of theirs has been replaced."""
    replaced = {where for where, name, function in _functions(modules) if not _is_own(name, function)}
    return [f"{', '.join(sorted(replaced))}, or what it calls, has been replaced"] if replaced else []


def attention_functions(modules: Iterable[nn.Module]) -> tuple[Any, ...]:
    """The functions that make a model's attention and its masks, to notice when another takes a place among them."""
    return tuple(function for _, _, function in _functions(modules))


def _functions(modules: Iterable[nn.Module]) -> Iterator[tuple[str, str, Any]]:
    """Each function once: where it is found, how its name begins if it is the one that belongs there, and itself."""
    wanted: dict[tuple[str, str], None] = {}
    adapted: dict[type[nn.Module], None] = {}
    # One of each kind stands for all: every call asks.
    for module in {(type(each), id(each.__dict__.get("config"))): each for each in modules}.values():
        kind: Any = type(module)
        config = module.__dict__.get("config")
        if isinstance(config, PretrainedConfig):
            implementation = user_implementation(config) or "eager"
            wanted |= dict.fromkeys((file, implementation) for file in _files(kind))
        if find_adapter(module) is not None:
            adapted[kind] = None
    for kind in adapted:
        yield f"{kind.__name__}.forward", kind.__name__, kind
    for file in dict.fromkeys(file for file, _ in wanted):
        for name, function in list(vars(sys.modules[file]).items()):
            if name.startswith("create_") and name.endswith("mask"):
                yield f"{file.rpartition('.')[2]}.{name}", "create_", function
    for file, implementation in wanted:
        variables = vars(sys.modules[file])
        begin = implementation.rstrip("_234")
        interface = variables.get("ALL_ATTENTION_FUNCTIONS")
        if implementation != "eager" and interface is not None and implementation in interface:
            yield f"the attention function {implementation}", begin, interface[implementation]
        elif implementation == "eager" and _EAGER in variables:
            yield f"{file.rpartition('.')[2]}.{_EAGER}", begin, variables[_EAGER]
    for implementation in dict.fromkeys(implementation for _, implementation in wanted):
        masks = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
        if implementation in masks:
            yield f"the mask function {implementation}", implementation.rstrip("_234"), masks[implementation]


@cache
def _files(kind: Any) -> tuple[str, ...]:
    """The files of transformers' models that a class and those that it inherits from are in."""
    files = dict.fromkeys(base.__module__ for base in kind.__mro__)
    return tuple(file for file in files if file.startswith("transformers.models."))


def _is_own(begin: str, function: Any) -> bool:
    """Whether a function is transformers', of a name with that beginning, and so is all that it calls."""
    name = getattr(function, "__name__", "")
    if not name.startswith(begin) or not is_original(name, function):
        return False
    if begin.startswith("flash"):
        return True  # what it calls is another library's, put there at the first call
    snapshot = _snapshot(function)
    if not snapshot.is_current():
        _snapshot.cache_clear()
        snapshot = _snapshot(function)
    return snapshot.is_original


@cache
def _snapshot(function: Any) -> Snapshot:
    return Snapshot(function)
