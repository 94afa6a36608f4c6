"""Which attention a config names: Orca's for the length of an iteration, the user's at all other times and threads."""

import os
from threading import RLock
from typing import Any

from transformers import PretrainedConfig

from orca_hf.attention_context import current_context

IMPLEMENTATION = "orca"

# Held while names are exchanged: models of several engines may share a config.
NAMING = RLock()
if hasattr(os, "register_at_fork"):
    # So that no child finds it held by a thread that it does not have.
    os.register_at_fork(before=NAMING.acquire, after_in_parent=NAMING.release, after_in_child=NAMING.release)


class _OrcaName(str):
    """Our name in a config, which remembers the user's. A copy of it, as in a copied model, is the user's.

    Models compare the name, as in `config._attn_implementation == "sdpa"`. On a thread that runs no iteration, where
    the model is to compute what it would without us, the user's name is equal to it too.
    """

    original: str | None
    users: set[int]  # who runs iterations under this name: models may share a config

    def __new__(cls, original: str | None) -> "_OrcaName":
        """Takes the place of `original`."""
        name = super().__new__(cls, IMPLEMENTATION)
        name.original = original
        name.users = set()
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


def name_orca(configs: tuple[PretrainedConfig, ...], user: object) -> None:
    """Let `configs` name Orca's attention, for `user`; a model's own config comes before its parts'."""
    with NAMING:
        for config in configs:
            current = config._attn_implementation
            name = current if isinstance(current, _OrcaName) else _OrcaName(current)
            name.users.add(id(user))
            _set_attention(config, name)


def name_users(configs: tuple[PretrainedConfig, ...], user: object) -> None:
    """Let `configs` name the user's attention again, unless others than `user` need Orca's; may be called again."""
    with NAMING:
        for config in configs:
            name = config._attn_implementation
            # A name that the user has set meanwhile stays.
            if isinstance(name, _OrcaName):
                name.users.discard(id(user))
                if not name.users:
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
