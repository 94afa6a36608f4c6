"""`orca-hf serve`: load, look that it is safe, serve, and end in order."""

import asyncio
import gc
import logging
import math
import os
import resource
import socket
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import suppress

import uvicorn
from fastapi import FastAPI
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import orca_hf
from orca_hf.checkpoint import check_files
from orca_hf.config import OrcaConfig
from orca_hf.errors import CheckpointError, ConfigError, OrcaError, OutputError
from orca_hf.runner import max_positions
from orca_hf.server.app import make_app
from orca_hf.server.checks import api_keys, bind, check_exposure, engine_config
from orca_hf.server.http import HttpConfig
from orca_hf.server.settings import ServerSettings

_UNLIMITED = 2**20  # for a model that does not say how long its rows may be
_ALWAYS_READ = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_SOMETIMES_READ = ("special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model")
_OTHER_FILES = 256  # file descriptors beside connections: weights, libraries, a compiler
_LAST_WORDS = 5  # seconds to tell clients that their time is over


def run_serve(given: Namespace, write: Callable[[str], object]) -> int:
    """Serves until SIGINT or SIGTERM, and returns the exit status.

    Raises:
        ConfigError: The settings contradict each other or are not safe.
        OrcaError: The model cannot be loaded.
    """
    keys, config = api_keys(given), engine_config(given)
    hosts = check_exposure(given.host, keys, insecure=given.insecure)
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
            max_connections=_room_for(given.max_connections),
            client_timeout=given.client_timeout,
            default_max_tokens=given.default_max_tokens,
            stall_timeout=given.stall_timeout,
            grace=given.grace,
        )
        app = make_app(engine, model, tokenizer, settings, warm_up=_while_somebody_reads(write))
        # All this stays. Looking at it again would hold all threads for 0.2 s each time that garbage is collected.
        gc.collect()
        gc.freeze()
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
                use_colors=None if sys.stdout else False,  # without a standard output it cannot look for itself
                timeout_graceful_shutdown=math.ceil(settings.grace + _LAST_WORDS),
            )
        )

        if log_level == "info":  # which is for requests; that it has started and ended, we say
            logging.getLogger("uvicorn.error").setLevel(logging.WARNING)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Called by uvicorn when a signal has come."""
        self.service.limits.closing = True
        over = asyncio.get_running_loop().call_later(self.grace, self.service.stop_running)
        try:
            await super().shutdown(sockets)
        finally:
            over.cancel()


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _load(given: Namespace, config: OrcaConfig) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    shared = {"trust_remote_code": given.trust_remote_code}
    if given.revision is not None:
        shared["revision"] = given.revision
    _check_folder(given.model, _ALWAYS_READ)
    try:
        model = orca_hf.load(given.model, dtype=given.dtype, device_map=given.device, config=config, **shared)
    except OrcaError:
        raise
    except Exception as error:
        raise _cannot_be_loaded(given.model, error) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(given.model, **shared)
    except Exception as error:  # tokenizers raises that very class
        _check_folder(given.model, _SOMETIMES_READ)  # which may name the file
        raise _cannot_be_loaded(f"The tokenizer of {given.model}", error) from error
    return model, tokenizer


def _check_folder(model: str, names: Sequence[str]) -> None:
    if os.path.isdir(model):
        check_files(model, names)


def _cannot_be_loaded(what: str, error: Exception) -> CheckpointError:
    return CheckpointError(f"{what} cannot be loaded: {type(error).__name__}: {error}")


def _while_somebody_reads(write: Callable[[str], object]) -> Callable[[str], object]:
    """A server goes on when whoever started it reads no more of what it says."""

    def written(line: str) -> None:
        with suppress(OutputError):
            write(line)

    return written


def _room_for(wanted: int) -> int:
    """How many connections the system lets the server have: each takes a file descriptor."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return wanted if soft == resource.RLIM_INFINITY else max(1, min(wanted, soft - _OTHER_FILES))


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
