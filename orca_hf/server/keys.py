"""API keys: which ones a server may have."""

from collections.abc import Iterable

from orca_hf.errors import ConfigError


def check_api_keys(keys: Iterable[str]) -> tuple[str, ...]:
    """`keys`, if each of them is one that a client has to know and is able to send.

    An empty key would be known to everybody: most often it is a shell variable that is not set. A message never
    repeats a key, since logs are read by others than the operator.

    Raises:
        ConfigError: One of them is not.
    """
    if isinstance(keys, str):
        raise ConfigError("api_keys is one text, which would make each of its characters a key. Give a tuple of keys.")
    checked = tuple(keys)
    for key in checked:
        if not key.strip():
            raise ConfigError(
                "An API key is empty or white space, so anybody could send it. Give one that is hard to guess (was a "
                "shell variable not set?), or leave --api-key and ORCA_HF_API_KEY out altogether."
            )
        if key != key.strip():
            raise ConfigError(
                "An API key begins or ends with white space, which HTTP takes away on its way here. Give it without."
            )
        if not key.isprintable():
            raise ConfigError(
                "An API key has a line end or another character that cannot be printed, so no header can carry it. "
                "Give one of visible characters."
            )
    return checked
