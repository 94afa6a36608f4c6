"""`orca-hf serve` in a process of its own, as the clients of a bench find it."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import urllib.request
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from orca_hf.bench.random_model import write_random_model
from orca_hf.errors import OrcaError

_PATIENCE = 60  # seconds for its last words


@dataclass(frozen=True, slots=True)
class LiveServer:
    """A server that runs.

    Attributes:
        url: Where.
        process: It.
    """

    url: str
    process: psutil.Process

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return host, int(port)

    def resident_bytes(self) -> int:
        """Memory that it has at this moment."""
        return int(self.process.memory_info().rss)

    def get(self, path: str) -> str:
        """The text at `path`."""
        with urllib.request.urlopen(self.url + path, timeout=_PATIENCE) as answer:
            return str(answer.read().decode())

    def status(self) -> dict[str, Any]:
        """Its /status.json."""
        found: dict[str, Any] = json.loads(self.get("/status.json"))
        return found


@contextmanager
def live_server(model: str, flags: Sequence[str], threads: int | None = None) -> Iterator[LiveServer]:
    """Serves a model on a free port until the block ends.

    Args:
        model: A folder or hub id.
        flags: Of `orca-hf serve`.
        threads: For the matrix products; None for PyTorch's own choice.

    Raises:
        OrcaError: It does not come up, or has not ended well.
    """
    command = [sys.executable, "-m", "orca_hf.cli", "serve", model, "--port", "0", "--log-level", "warning", *flags]
    # The server is to be of this very package, however this one was found.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    if threads:
        environment["OMP_NUM_THREADS"] = str(threads)
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        yield LiveServer(_url(process), psutil.Process(process.pid))
        process.send_signal(signal.SIGTERM)
        process.wait(_PATIENCE)
    finally:
        process.kill()
        process.communicate()
    if process.returncode not in (0, -signal.SIGTERM, 128 + signal.SIGTERM):
        raise OrcaError(f"orca-hf serve ended with status {process.returncode}.")


@contextmanager
def server_of(arguments: Namespace, flags: Sequence[str]) -> Iterator[LiveServer]:
    """Serves the model that a bench is given, in float32, or a tiny random one where it is given none.

    Args:
        arguments: The bench's: its model, seed and threads.
        flags: Of `orca-hf serve`, beside.

    Raises:
        OrcaError: As for `live_server`.
    """
    with ExitStack() as stack:
        model = arguments.model
        if model is None:
            model = stack.enter_context(tempfile.TemporaryDirectory())
            write_random_model(Path(model), arguments.seed)
        yield stack.enter_context(live_server(model, ["--dtype", "float32", *flags], arguments.threads))


def _url(process: subprocess.Popen[str]) -> str:
    """Where the server is, once it has warmed up."""
    assert process.stdout is not None
    url = ""
    for line in process.stdout:
        url = line.strip().partition(" on http://")[2] or url
        if url and line.startswith("Ready"):
            return f"http://{url}"
    raise OrcaError("orca-hf serve has not come up; what it says of it stands above.")
