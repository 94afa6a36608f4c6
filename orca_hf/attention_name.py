"""Which attention a config names: Orca's for the length of an iteration, the user's at all other times and threads."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

from transformers import PretrainedConfig

from orca_hf.attention_context import current_context

IMPLEMENTATION = "orca"

# Held while names are exchanged: models of several engines may share a config.
_naming = Lock()
if hasattr(os, "register_at_fork"):
    # So that no child finds it held by a thread that it does not have.
    os.register_at_fork(before=_naming.acquire, after_in_parent=_naming.release, after_in_child=_naming.release)


class _OrcaName(str):
    """Our name in a config, which remembers the user's. A copy of it, as in a copied model, is the user's.

    Models compare the name, as in `config._attn_implementation == "sdpa"`. On a thread that runs no iteration, where
    the model is to compute what it would without us, the user's name is equal to it too.
    """

    original: str | None
    uses: int  # iterations that run under this name: models may share a config

    def __new__(cls, original: str | None) -> "_OrcaName":
        """Takes the place of `original`."""
        name = super().__new__(cls, IMPLEMENTATION)
        name.original = original
        name.uses = 0
        return name

    def __eq__(self, other: object) -> bool:
        return other == IMPLEMENTATION or (current_context() is None and self.original == other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__

    def __reduce__(self) -> tuple[Any, ...]:
        return _identity, (self.original,)

    def __deepcopy__(self, memo: dict[int, Any]) -> str | None:
        return self.original


def _identity(value: Any) -> Any:
    return value


@contextmanager
def orca_attention(configs: tuple[PretrainedConfig, ...]) -> Iterator[None]:
    """Let `configs` name Orca's attention within the block; a model's own config comes before its parts'."""
    names: list[tuple[PretrainedConfig, _OrcaName]] = []
    try:
        with _naming:
            for config in configs:
                current = config._attn_implementation
                name = current if isinstance(current, _OrcaName) else _OrcaName(current)
                name.uses += 1
                names.append((config, name))
                _set_attention(config, name)
        yield
    finally:
        with _naming:
            for config, name in names:
                name.uses -= 1
                # A name that the user has set meanwhile stays.
                if name.uses == 0 and config._attn_implementation is name:
                    _set_attention(config, name.original)


def restore_attention(configs: tuple[PretrainedConfig, ...]) -> None:
    """Let `configs` name the user's attention again, whoever was running under Orca's name."""
    for config in configs:
        if isinstance(config._attn_implementation, _OrcaName):
            _set_attention(config, config._attn_implementation.original)


def _set_attention(config: PretrainedConfig, name: str | None) -> None:
    if "_attn_implementation_internal" in config.__dict__:
        # What the property sets, without its validation and its walk over sub-configs, which are in the list too.
        config.__dict__["_attn_implementation_internal"] = name
    else:
        config._attn_implementation = name


def user_implementation(config: PretrainedConfig) -> Any:
    """The attention implementation that the user chose, in an iteration too."""
    current = config._attn_implementation  # the iteration that the caller met may have ended since
    return current.original if isinstance(current, _OrcaName) else current
