"""Whether a class's forward is, word for word, that of a class that we know.

transformers writes the same few modules into file after file, under another name each time. What is known of one holds
for its copies, as long as not only the forward is the same, but everything of its file that it calls; and as long as
nobody has put something else in the place of any of it.
"""

from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import transformers
from torch import nn

_TRANSFORMERS = str(Path(transformers.__file__).parent)
_MISSING = object()


def has_same_forward(this: type[nn.Module], known: type[nn.Module]) -> bool:
    """Whether `this` has `known`'s forward, and what that uses, and `known` is as transformers wrote it."""
    return _is_same(this.forward, known.forward, (this, known))


class Snapshot:
    """A class's forward and what it uses, to notice when somebody has put something else in their place.

    Args:
        owner: The class.
    """

    __slots__ = ("forward", "owner", "used")

    def __init__(self, owner: type[nn.Module]) -> None:
        self.owner = owner
        self.forward = owner.forward
        self.used = tuple(_used(owner.forward))

    def is_current(self) -> bool:
        """Whether nothing has been replaced since."""
        return self.owner.forward is self.forward and all(space.get(name) is value for space, name, value in self.used)


def _used(function: Any) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """The variables of its file that a function, what it is put around, and what they call read: where, name, value."""
    while isinstance(function, FunctionType):
        for name in function.__code__.co_names:
            if (value := function.__globals__.get(name, _MISSING)) is not _MISSING:
                yield function.__globals__, name, value
                if value is not function:
                    yield from _used(value)
        function = getattr(function, "__wrapped__", None)


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
