"""`orca-hf serve`: load, look that it is safe, serve, and end in order."""

import asyncio
import ipaddress
import math
import os
import socket
from argparse import Namespace
from collections.abc import Callable, Sequence

import uvicorn
from fastapi import FastAPI
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import orca_hf
from orca_hf.config import OrcaConfig
from orca_hf.errors import CheckpointError, ConfigError
from orca_hf.runner import max_positions
from orca_hf.server.app import make_app
from orca_hf.server.http import HttpConfig
from orca_hf.server.keys import check_api_keys
from orca_hf.server.settings import ServerSettings

_KEY_VARIABLE = "ORCA_HF_API_KEY"
_UNLIMITED = 2**20  # for a model that does not say how long its rows may be
_LAST_WORDS = 5  # seconds to tell clients that their time is over


def run_serve(given: Namespace, write: Callable[[str], object]) -> int:
    """Serves until SIGINT or SIGTERM, and returns the exit status.

    Raises:
        ConfigError: The settings contradict each other or are not safe.
        OrcaError: The model cannot be loaded.
    """
    from_environment = os.environ.get(_KEY_VARIABLE)  # "" is refused like any empty key: who set it wants to have one
    keys = check_api_keys([*given.api_key, *([] if from_environment is None else [from_environment])])
    hosts = check_exposure(given.host, keys, insecure=given.insecure)
    config = OrcaConfig(
        max_batch_size=given.max_num_seqs,
        max_batch_tokens=given.max_num_batched_tokens or None,
        max_slots=given.max_slots,
        block_size=given.block_size,
        deterministic=given.deterministic,
    )
    with bind(given.host, given.port) as listener:
        write(f"Loading {given.model} ...")
        model, tokenizer = _load(given, config)
        engine = orca_hf.engine(model)
        settings = ServerSettings(
            model_names=tuple(given.served_model_name or [_name_of(given.model)]),
            max_model_len=_model_len(model, engine.stats().num_slots, given.max_model_len),
            api_keys=keys,
            hosts=hosts,
            max_open=given.max_num_seqs + given.max_queue,
            max_per_client=given.max_requests_per_key,
            max_body_bytes=given.max_body_bytes,
            special_tokens_in_text=given.special_tokens_in_text,
            strict=given.strict,
            default_max_tokens=given.default_max_tokens,
            stall_timeout=given.stall_timeout,
            grace=given.grace,
        )
        app = make_app(engine, model, tokenizer, settings, warm_up=write)
        listener.listen()  # who has read the next line and comes before the loop runs waits in the kernel
        write(f"Serving {settings.model_names[0]} on http://{_address(listener)}")
        try:
            Server(app, settings, log_level=given.log_level).run([listener])
        except KeyboardInterrupt:  # uvicorn ends in order, and then repeats the signal
            return 130
    return 0


class Server(uvicorn.Server):
    """uvicorn, which ends as `grace` says: no new requests, time for those that run, then an error for the rest.

    Args:
        app: Of `make_app`.
        settings: The operator's.
        log_level: uvicorn's.
    """

    def __init__(self, app: FastAPI, settings: ServerSettings, *, log_level: str = "info") -> None:
        self.service = app.state.service
        self.grace = settings.grace
        super().__init__(
            HttpConfig(
                app,
                max_connections=settings.max_connections,
                client_timeout=settings.client_timeout,
                log_level=log_level,
                timeout_graceful_shutdown=math.ceil(settings.grace + _LAST_WORDS),
            )
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Called by uvicorn when a signal has come."""
        self.service.limits.closing = True
        over = asyncio.get_running_loop().call_later(self.grace, self.service.stop_running)
        try:
            await super().shutdown(sockets)
        finally:
            over.cancel()


def check_exposure(host: str, api_keys: Sequence[str], *, insecure: bool) -> tuple[str, ...] | None:
    """Which names the server answers to, None for all.

    Raises:
        ConfigError: Others could reach it, and there is no key.
    """
    if api_keys or insecure:
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
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise ConfigError(f"--host {host} --port {port} cannot be bound: {error}.") from error
    return listener


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _load(given: Namespace, config: OrcaConfig) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    shared = {"trust_remote_code": given.trust_remote_code}
    if given.revision is not None:
        shared["revision"] = given.revision
    model = orca_hf.load(given.model, dtype=given.dtype, device_map=given.device, config=config, **shared)
    try:
        tokenizer = AutoTokenizer.from_pretrained(given.model, **shared)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{given.model} has no tokenizer that can be loaded: {error}") from error
    return model, tokenizer


def _name_of(model: str) -> str:
    """A folder's own name: where it lies is nobody's business."""
    return os.path.basename(os.path.realpath(model)) if os.path.isdir(model) else model


def _model_len(model: PreTrainedModel, num_slots: int, asked: int | None) -> int:
    """How long prompt and answer may be together: as asked, or as long as model and K/V memory allow."""
    limits = {"the model has {} positions": max_positions(model), "the K/V memory has {} slots": num_slots or None}
    for words, limit in limits.items():
        if asked is not None and limit is not None and asked > limit:
            raise ConfigError(f"--max-model-len is {asked}, but {words.format(limit)}.")
    return asked or min((limit for limit in limits.values() if limit is not None), default=_UNLIMITED)
