"""Whether a class's forward is, word for word, that of a class that we know.

transformers writes the same few modules into file after file, under another name each time. What is known of one holds
for its copies, as long as not only the forward is the same, but everything of its file that it calls.
"""

from functools import cache
from types import CodeType, FunctionType
from typing import Any

from torch import nn


@cache
def has_same_forward(this: type[nn.Module], known: type[nn.Module]) -> bool:
    """Whether `this` has `known`'s forward, and the functions and methods that the forward uses."""
    return this is known or _is_same(this.forward, known.forward, (this, known))


def _is_same(ours: Any, theirs: Any, owners: tuple[type, type]) -> bool:
    if ours is theirs:
        return True
    if not (isinstance(ours, FunctionType) and isinstance(theirs, FunctionType)):
        return False
    if _words(ours.__code__) != _words(theirs.__code__) or ours.__defaults__ != theirs.__defaults__:
        return False
    # Behind a decorator stands what it was put around; the decorator's own code has just been compared.
    if hasattr(ours, "__wrapped__") or hasattr(theirs, "__wrapped__"):
        return _is_same(getattr(ours, "__wrapped__", None), getattr(theirs, "__wrapped__", None), owners)
    missing = object()
    for name in ours.__code__.co_names:
        for mine, other in (
            (ours.__globals__.get(name, missing), theirs.__globals__.get(name, missing)),
            tuple(getattr(owner, name, missing) for owner in owners),
        ):
            if mine is not other and not _is_same(mine, other, owners):
                return False
    return True


def _words(code: CodeType) -> tuple[Any, ...]:
    """What a function does, without its place in a file and its docstring."""
    constants = [constant for constant in code.co_consts if not isinstance(constant, str | CodeType)]
    strings = {constant for constant in code.co_consts if isinstance(constant, str)}
    strings.discard(_docstring(code))
    inner = [_words(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return (code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants, sorted(strings), inner)


def _docstring(code: CodeType) -> Any:
    return code.co_consts[0] if code.co_consts else None
