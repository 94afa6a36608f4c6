"""Whose code something is: that of a library that is known, or the user's own.

A module, a hook or a function of the user's own may look at the shape of a batch, at its last position, or at its
neighbours; a flattened batch has other ones, and no trial can show every case of that. It may also write into the
model's weights. The code of libraries that models are made and trained with is known to do neither.
"""

import sys
from collections.abc import Collection, Iterable, Iterator
from functools import partial
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from transformers import PreTrainedModel

_LIBRARIES = frozenset({
    "accelerate",
    "auto_gptq",
    "autoawq",
    "awq",
    "bitsandbytes",
    "compressed_tensors",
    "causal_conv1d",
    "deepspeed",
    "einops",
    "fla",
    "flash_attn",
    "gptqmodel",
    "hqq",
    "huggingface_hub",
    "kernels",
    "liger_kernel",
    "lm_eval",
    "mamba_ssm",
    "numpy",
    "optimum",
    "orca_hf",
    "orca_kernels",
    "peft",
    "safetensors",
    "torch",
    "torchao",
    "transformers",
    "transformers_modules",  # a checkpoint's own code, run with trust_remote_code
    "trl",
    "triton",
}) | sys.stdlib_module_names  # fmt: skip
_FUNCTIONS = (FunctionType, MethodType, partial)
_KINDS = frozenset(_FUNCTIONS)
# What every module inherits, and no forward asks for but for these names.
_BASES = frozenset({object, nn.Module, *PreTrainedModel.__mro__})
_CALLING = ("__call__", "_call_impl", "_wrapped_call_impl", "forward")


class KnownCode:
    """Tells known code from the user's own.

    Args:
        trusted: Names of Python modules and packages that the user vouches for; `__main__` is the script itself.
    """

    def __init__(self, trusted: Collection[str] = ()) -> None:
        self._trusted = tuple(trusted)
        self._known_functions: WeakSet[FunctionType] = WeakSet()
        self._verdicts: dict[type, tuple[list[Any], str | None]] = {}

    def is_known(self, thing: Any) -> bool:
        """Whether an object is of a known class, and all functions that it was given are known too."""
        if isinstance(thing, type):
            return self.unknown_class(thing) is None
        if isinstance(thing, (*_FUNCTIONS, BuiltinFunctionType)):
            return all(map(self._is_known_place, places(thing)))
        given = getattr(thing, "__dict__", {}).values()
        return self.unknown_class(type(thing)) is None and all(
            self.is_known(value) for value in given if isinstance(value, _FUNCTIONS)
        )

    def unknown_class(self, kind: type) -> str | None:
        """What of a class is not known, in words; None if all is. Looked at anew when anything of it was exchanged."""
        looked_at = [(base, name, value) for base in kind.__mro__ for name, value in _members(base)]
        now = [value for _, _, value in looked_at]
        before, verdict = self._verdicts.get(kind, ([], None))
        if len(now) != len(before) or not all(map(is_, now, before)):
            unknown = (f"{kind.__name__}.{name}" for _, name, value in looked_at if not self._is_known_member(value))
            own = next((base for base in kind.__mro__ if not self._is_known_place(base.__module__)), None)
            verdict = kind.__name__ if own is not None else next(unknown, None)
            self._verdicts[kind] = now, verdict
        return verdict

    def unknown_in(self, modules: Iterable[nn.Module]) -> str | None:
        """What of a model's `modules` is code of the user's own, in words; None if nothing is."""
        kinds = set()
        for place, module in enumerate(modules):
            kinds.add(type(module))
            if _KINDS.isdisjoint(map(type, module.__dict__.values())):
                continue  # nearly all, and every call asks
            for name, value in module.__dict__.items():
                # What hangs on the model itself, its modules do not know.
                if type(value) in _KINDS and (place or hasattr(type(module), name)) and not self.is_known(value):
                    return f"the {name} of a {type(module).__name__}"
        for kind in kinds:
            if (unknown := self.unknown_class(kind)) is not None:
                return unknown
        # Functions that someone has put into the libraries' files which the classes are from.
        files = {kind.__module__ for kind in kinds} | {torch.nn.functional.__name__}
        for file in files & sys.modules.keys():
            if file.partition(".")[0] not in _LIBRARIES:
                continue
            for name, value in list(vars(sys.modules[file]).items()):
                if type(value) is FunctionType and value not in self._known_functions:
                    if not self.is_known(value):
                        return f"{file.rpartition('.')[2]}.{name}"
                    self._known_functions.add(value)
        return None

    def _is_known_member(self, value: Any) -> bool:
        if isinstance(value, staticmethod | classmethod):
            value = value.__func__
        elif isinstance(value, property):
            return all(self.is_known(each) for each in (value.fget, value.fset) if each is not None)
        return not isinstance(value, _FUNCTIONS) or self.is_known(value)

    def _is_known_place(self, place: str) -> bool:
        return place.partition(".")[0] in _LIBRARIES or any(
            place == name or place.startswith(f"{name}.") for name in self._trusted
        )


def _members(base: type) -> Iterator[tuple[str, Any]]:
    """What a module's forward may call of one of its classes."""
    members = vars(base)
    if base not in _BASES:
        yield from members.items()
        return
    for name in _CALLING:
        if name in members:
            yield name, members[name]


def places(function: Any) -> list[str]:
    """The files in which a function was written, and after it those that it was put around."""
    found: list[str] = []
    while function is not None:
        if isinstance(function, partial):
            function = function.func
        elif isinstance(function, MethodType):
            function = function.__func__
        elif isinstance(function, FunctionType):
            found.append(str(function.__globals__.get("__name__")))
            function = getattr(function, "__wrapped__", None)
        else:  # written in C, or an object that is called
            found.append(str(getattr(function, "__module__", None) or type(function).__module__))
            break
    return found
