"""Whether a class's forward is, word for word, that of a class that we know.

transformers writes the same few modules into file after file, under another name each time. What is known of one holds
for its copies, as long as not only the forward is the same, but everything of its file that it calls; and as long as
nobody has put something else in the place of any of it.
"""

import os
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MethodDescriptorType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any

import torch
import transformers
from torch import Tensor, nn

_TRANSFORMERS, _TORCH = (str(Path(str(package.__file__)).parent) + os.sep for package in (transformers, torch))
_MISSING = object()
# By which a module's call comes to its forward, and a module to its attributes.
_MACHINERY = ("__call__", "_wrapped_call_impl", "_call_impl", "__getattr__", "__getattribute__")
# Those that bytecode does not name.
_OPERATORS = (
    *(f"__{name}__" for name in ("add", "sub", "mul", "truediv", "pow", "matmul", "neg", "getitem")),
    *(f"__r{name}__" for name in ("add", "sub", "mul", "truediv", "pow", "matmul")),
)


def has_same_forward(this: type[nn.Module], known: type[nn.Module]) -> bool:
    """Whether `this` has `known`'s forward, and what that uses, and `known` is as transformers wrote it."""
    if any(getattr(this, name) is not getattr(known, name) for name in _MACHINERY):
        return False
    return _is_same(this.forward, known.forward, (this, known))


class Snapshot:
    """What runs when a function, or a class's forward, is called; to notice when any of it has been replaced.

    That is the function, what it is put around, the variables of its file that it reads and the functions among them,
    the functions of torch and the methods of tensors that it names, and those of its class.

    Args:
        function: The function, or the class whose forward is meant.

    Attributes:
        function: As given.
        is_original: Nothing of it was a replacement when the snapshot was made: it is as torch and transformers have
            written it.
        methods: Names that an object of the class must not have for itself, since the forward would find it there.
    """

    __slots__ = ("_attributes", "_variables", "function", "is_original", "methods")

    def __init__(self, function: Any) -> None:
        self.function = function
        owner = function if isinstance(function, type) else None
        used = _Used(owner)
        used.follow(function if owner is None else getattr(owner, "forward", None))
        self._variables = tuple((space, name, space.get(name, _MISSING)) for space, name in used.variables.values())
        self._attributes = tuple((kind, name, getattr(kind, name, _MISSING)) for kind, name in used.attributes)
        self.methods = frozenset(name for kind, name in used.attributes if kind is owner and name not in _MACHINERY)
        self.is_original = all(is_original(name, value) for _, name, value in (*self._variables, *self._attributes))

    def is_current(self) -> bool:
        """Whether nothing has been replaced since."""
        return all(space.get(name, _MISSING) is value for space, name, value in self._variables) and all(
            getattr(kind, name, _MISSING) is value for kind, name, value in self._attributes
        )


class Snapshots:
    """One snapshot for each class, so that it is looked at once in an iteration for all modules of that class."""

    def __init__(self) -> None:
        self._of: dict[type[nn.Module], Snapshot] = {}

    def of(self, owner: type[nn.Module]) -> Snapshot:
        """A snapshot of a class's forward as it is now."""
        found = self._of.get(owner)
        if found is None or not found.is_current():
            found = self._of[owner] = Snapshot(owner)
        return found

    def current(self) -> frozenset[Snapshot]:
        """Those that show what is still so, and is original."""
        return frozenset(found for found in self._of.values() if found.is_original and found.is_current())


class _Used:
    """Collects what a function uses: where it is looked up, and by which name.

    Args:
        owner: The class of `self` in the function, if it is a method.

    Attributes:
        variables: Of files and of torch's modules, as (namespace, name).
        attributes: Of classes, as (class, name).
    """

    def __init__(self, owner: type[nn.Module] | None) -> None:
        self.owner = owner
        self.variables: dict[tuple[int, str], tuple[dict[str, Any], str]] = {}
        self.attributes: dict[tuple[type, str], None] = dict.fromkeys((Tensor, name) for name in _OPERATORS)
        if owner is not None:
            self.attributes |= dict.fromkeys((owner, name) for name in ("forward", *_MACHINERY))
        self._seen: set[int] = set()

    def follow(self, function: Any) -> None:
        """Collect what `function` uses, and what it is put around, and what they call."""
        while isinstance(function, FunctionType) and id(function) not in self._seen:
            self._seen.add(id(function))
            names = _names(function.__code__)
            self._look_up(function.__globals__, names)
            self.attributes |= dict.fromkeys((Tensor, name) for name in names if hasattr(Tensor, name))
            if self.owner is not None:
                self._follow_methods(self.owner, names)
            function = getattr(function, "__wrapped__", None)

    def _follow_methods(self, owner: type, names: frozenset[str]) -> None:
        for name in names:
            method = getattr(owner, name, None)
            if isinstance(method, FunctionType) and method is not getattr(nn.Module, name, None):
                self.attributes[owner, name] = None
                self.follow(method)

    def _look_up(self, variables: dict[str, Any], names: frozenset[str]) -> None:
        """Collect which of `names` are variables of a file, or of a module of torch's among them."""
        spaces = [variables]
        for space in spaces:
            for name in names & space.keys():
                self.variables[id(space), name] = space, name
                value = space[name]
                if isinstance(value, ModuleType):
                    inner = vars(value)
                    if value.__name__.partition(".")[0] == "torch" and all(inner is not each for each in spaces):
                        spaces.append(inner)
                elif not _is_from(value, _TORCH):  # torch's own functions are taken as a whole
                    self.follow(value)


def _names(code: CodeType) -> frozenset[str]:
    """The variables and attributes that a function names, and those that the functions inside it do."""
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset(code.co_names).union(*inner)


def _is_from(value: Any, folder: str) -> bool:
    return isinstance(value, FunctionType) and value.__code__.co_filename.startswith(folder)


def is_original(name: str, value: Any) -> bool:
    """Whether what is found under a name is what torch or transformers has put there, as far as can be told by it."""
    if isinstance(value, FunctionType):
        return _is_from(value, _TRANSFORMERS) or (_is_from(value, _TORCH) and _is_named(value, name))
    if isinstance(value, BuiltinFunctionType | MethodDescriptorType | WrapperDescriptorType):
        return _is_named(value, name)
    if value is _MISSING or isinstance(value, type | ModuleType) or not callable(value):
        return True
    return type(value).__module__.partition(".")[0] in ("torch", "transformers")


def _is_named(function: Any, name: str) -> bool:
    # Of the special methods some are others by another name, as __call__ is.
    return function.__name__ == name or name.startswith("__")


def _is_same(ours: Any, theirs: Any, owners: tuple[type, type]) -> bool:
    if not isinstance(theirs, FunctionType):
        return ours is theirs
    if not isinstance(ours, FunctionType) or not theirs.__code__.co_filename.startswith(_TRANSFORMERS):
        return False
    if _words(ours.__code__) != _words(theirs.__code__) or ours.__defaults__ != theirs.__defaults__:
        return False
    # Behind a decorator stands what it was put around; the decorator's own code has just been compared.
    if hasattr(ours, "__wrapped__") or hasattr(theirs, "__wrapped__"):
        return _is_same(getattr(ours, "__wrapped__", None), getattr(theirs, "__wrapped__", None), owners)
    for name in ours.__code__.co_names:
        mine, other = ours.__globals__.get(name, _MISSING), theirs.__globals__.get(name, _MISSING)
        if not _is_same(mine, other, owners):
            return False
        mine, other = (getattr(owner, name, _MISSING) for owner in owners)
        inherited = getattr(nn.Module, name, _MISSING)
        if not (mine is other is inherited or _is_same(mine, other, owners)):
            return False
    return True


def _words(code: CodeType) -> tuple[Any, ...]:
    """What a function does, without its place in a file and its docstring."""
    constants = [constant for constant in code.co_consts if not isinstance(constant, str | CodeType)]
    strings = {constant for constant in code.co_consts if isinstance(constant, str)}
    if code.co_consts:
        strings.discard(code.co_consts[0])  # the docstring, or None
    inner = [_words(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return (code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants, sorted(strings), inner)
