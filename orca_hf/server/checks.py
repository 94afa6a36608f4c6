"""What of a command line is judged before anything is loaded. Needs neither PyTorch nor a web server."""

import ipaddress
import os
import socket
from argparse import Namespace
from collections.abc import Sequence

from orca_hf.config import OrcaConfig
from orca_hf.errors import ConfigError
from orca_hf.server.keys import check_api_keys

_KEY_VARIABLE = "ORCA_HF_API_KEY"
_MAX_NAME = 256  # characters of a model's name in a request


def check_arguments(given: Namespace) -> None:
    """Refuses a command line that cannot work, whatever the model is.

    Raises:
        ConfigError: Something in it contradicts itself, or is not safe.
    """
    check_exposure(given.host, api_keys(given), insecure=given.insecure)
    engine_config(given)
    _addresses(given.host, given.port)
    for name in given.served_model_name or ():
        if not name.strip() or len(name) > _MAX_NAME:
            raise ConfigError(
                f"--served-model-name has a name of {len(name)} characters, but a request can ask for one of 1 to "
                f"{_MAX_NAME}, and not for white space."
            )
    if given.max_model_len is not None and given.max_slots is not None and given.max_model_len > given.max_slots:
        raise ConfigError(f"--max-model-len is {given.max_model_len}, but the K/V memory has {given.max_slots} slots.")


def api_keys(given: Namespace) -> tuple[str, ...]:
    """The keys of the command line and the environment.

    Raises:
        ConfigError: One is none.
    """
    from_environment = os.environ.get(_KEY_VARIABLE)  # "" is refused like any empty key: who set it wants to have one
    return check_api_keys([*given.api_key, *([] if from_environment is None else [from_environment])])


def engine_config(given: Namespace) -> OrcaConfig:
    """How the engine is to schedule.

    Raises:
        ConfigError: Settings contradict each other.
    """
    return OrcaConfig(
        max_batch_size=given.max_num_seqs,
        max_batch_tokens=given.max_num_batched_tokens or None,
        max_slots=given.max_slots,
        block_size=given.block_size,
        deterministic=given.deterministic,
    )


def check_exposure(host: str, keys: Sequence[str], *, insecure: bool) -> tuple[str, ...] | None:
    """Which names the server answers to, None for all.

    Raises:
        ConfigError: Others could reach it, and there is no key.
    """
    if keys or insecure:
        return None
    if not _is_loopback(host):
        raise ConfigError(
            f"--host {host} lets other machines in, and there is no --api-key (or {_KEY_VARIABLE}). Give one, or say "
            "--insecure if something else keeps strangers out."
        )
    return tuple(dict.fromkeys(["127.0.0.1", "localhost", "::1", host]))


def bind(host: str, port: int) -> socket.socket:
    """A socket that is bound before the model is loaded: what is wrong with the address is said at once.

    Raises:
        ConfigError: The address cannot be had.
    """
    family, address = _addresses(host, port)
    # asyncio sends small pieces at once, instead of after those before them are acknowledged, on sockets that say TCP.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _cannot_be_bound(host, port, error) from error
    return listener


def _addresses(host: str, port: int) -> tuple[socket.AddressFamily, tuple[str, int]]:
    if not 0 <= port <= 65535:
        raise _cannot_be_bound(host, port, "a port is 0 to 65535")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.getaddrinfo(host or None, port, family, socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, ValueError) as error:  # ValueError: what cannot be a name at all
        raise _cannot_be_bound(host, port, error) from error
    return family, (host, port)


def _cannot_be_bound(host: str, port: int, reason: object) -> ConfigError:
    return ConfigError(f"--host {host} --port {port} cannot be bound: {reason}.")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
