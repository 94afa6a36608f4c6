"""The command line of `orca-hf serve`. Needs neither PyTorch nor a web server, so that --help is quick."""

import argparse
from typing import Any

from orca_hf.flags import real, whole


def add_serve(commands: Any) -> None:
    """Adds `serve` to the parsers of `orca-hf`. Names are those of `vllm serve` and `transformers serve`."""
    about = "serve a model over HTTP, as OpenAI's API"
    parser: argparse.ArgumentParser = commands.add_parser("serve", help=about, description=about)
    parser.add_argument("model", metavar="MODEL", help="a folder or hub id")
    parser.add_argument("--served-model-name", nargs="+", metavar="NAME", help="what requests call it (default: MODEL)")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"))
    parser.add_argument("--device", default="auto", help="as from_pretrained's device_map (default: auto)")
    parser.add_argument("--revision", help="of a hub id")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")
    _add_network(parser.add_argument_group("network"))
    _add_scheduling(parser.add_argument_group("scheduling"))
    _add_limits(parser.add_argument_group("limits"))


def _add_network(group: Any) -> None:
    group.add_argument("--host", default="127.0.0.1", help="address to bind to (default: 127.0.0.1)")
    group.add_argument("--port", type=whole(0), default=8000, help="0 takes a free one (default: 8000)")
    group.add_argument(
        "--api-key", action="append", default=[], metavar="KEY",
        help="which requests must have; may be repeated. ORCA_HF_API_KEY is another way, which `ps` does not show",
    )  # fmt: skip
    group.add_argument(
        "--insecure", action="store_true", help="bind to any address without a key, and answer to any name"
    )
    group.add_argument(
        "--grace", type=real(at_least=0), default=30.0, metavar="SECONDS",
        help="that running requests get when the server is told to stop (default: 30)",
    )  # fmt: skip
    group.add_argument("--log-level", default="info", choices=("critical", "error", "warning", "info", "debug"))


def _add_scheduling(group: Any) -> None:
    group.add_argument("--max-num-seqs", type=whole(1), default=32, help="requests in an iteration (default: 32)")
    group.add_argument(
        "--max-num-batched-tokens", type=whole(0), default=512,
        help="tokens in an iteration; 0 for whole prompts (default: 512)",
    )  # fmt: skip
    group.add_argument("--max-slots", type=whole(1), help="K/V memory in tokens (default: what free memory gives)")
    group.add_argument("--block-size", type=whole(1), default=16, help="tokens in a K/V block (default: 16)")
    group.add_argument("--deterministic", action="store_true", help="answers do not depend on neighbours, bit by bit")


def _add_limits(group: Any) -> None:
    group.add_argument("--max-model-len", type=whole(1), help="tokens of prompt and answer (default: the model's)")
    group.add_argument(
        "--default-max-tokens", type=whole(1), default=1024,
        help="longest answer of a chat that does not say it (default: 1024)",
    )  # fmt: skip
    group.add_argument("--max-queue", type=whole(0), default=992, help="answers waiting, beyond --max-num-seqs")
    group.add_argument(
        "--max-requests-per-key", type=whole(1), default=256,
        help="open at once; of an address, where there are no keys (default: 256)",
    )  # fmt: skip
    group.add_argument(
        "--stall-timeout", type=real(at_least=0), default=120.0, metavar="SECONDS",
        help="after which a client that does not read its stream loses it (default: 120)",
    )  # fmt: skip
    group.add_argument(
        "--max-connections", type=whole(1), default=2048,
        help="at once; one that waits for its client makes room for a new one (default: 2048)",
    )  # fmt: skip
    group.add_argument(
        "--client-timeout", type=real(above=0), default=30.0, metavar="SECONDS",
        help="that a client gets for a request's head, and for each piece of its body (default: 30)",
    )  # fmt: skip
    group.add_argument("--max-body-bytes", type=whole(1), default=4 * 2**20, help="of a request (default: 4 MiB)")
    group.add_argument(
        "--strict", action="store_true", help="refuse requests with unknown fields, which are otherwise logged"
    )
    group.add_argument(
        "--no-special-tokens-in-text", dest="special_tokens_in_text", action="store_false",
        help="the text of a special token, such as an end of turn, stays text where a client writes it",
    )  # fmt: skip
