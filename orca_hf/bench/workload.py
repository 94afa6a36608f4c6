"""Requests to measure with: synthetic ones, those of a trace, those of a file. The same seed gives the same."""

import csv
import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from orca_hf.errors import RequestError

_FIRST_TOKEN = 3  # below it most vocabularies keep their special tokens


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """What a client asks for. It generates exactly `num_outputs` tokens: EOS is ignored, as in the paper (6.2).

    Attributes:
        prompt: Token ids.
        num_outputs: Tokens to generate.
        arrival: Seconds after the first request.
    """

    prompt: tuple[int, ...]
    num_outputs: int
    arrival: float = 0.0


def random_prompt(rng: random.Random, length: int, vocab_size: int) -> tuple[int, ...]:
    """`length` tokens that say nothing."""
    return tuple(rng.randrange(_FIRST_TOKEN, vocab_size) for _ in range(length))


def synthetic(
    count: int,
    *,
    prompt: tuple[int, int],
    output: tuple[int, int],
    rate: float,
    vocab_size: int,
    scale: float = 1.0,
    seed: int = 0,
) -> list[ClientRequest]:
    """Uniform lengths and Poisson arrivals, as in section 6.2 of the paper.

    Args:
        count: How many.
        prompt: Fewest and most tokens in.
        output: Fewest and most tokens out.
        rate: Requests a second; inf for all at once.
        vocab_size: Of the model.
        scale: Multiplies all lengths.
        seed: Of lengths and arrivals. The lengths do not depend on the rate.
    """
    rng = random.Random(seed)
    lengths = [(rng.randint(*prompt), rng.randint(*output)) for _ in range(count)]
    arrivals = [0.0]
    for _ in lengths[1:]:
        arrivals.append(arrivals[-1] + (0.0 if math.isinf(rate) else rng.expovariate(1.0) / rate))
    return _requests(lengths, arrivals, vocab_size, scale, seed)


def azure(
    path: str | Path,
    count: int,
    *,
    speed: float,
    max_total: int,
    vocab_size: int,
    scale: float = 1.0,
    seed: int = 0,
) -> list[ClientRequest]:
    """Stamps and lengths of consecutive requests of an Azure LLM inference trace, from somewhere in its middle.

    Args:
        path: A CSV file with TIMESTAMP, ContextTokens and GeneratedTokens.
        count: How many.
        speed: How many times faster than in the trace they arrive.
        max_total: Requests with more tokens in and out are skipped.
        vocab_size: Of the model.
        scale: Multiplies all lengths.
        seed: Of the place in the trace, and of the tokens.

    Raises:
        RequestError: The file is no such trace, or too short.
    """
    rows = []
    with open(path, newline="", encoding="utf-8") as file:
        try:
            for row in csv.DictReader(file):
                num_in, num_out = int(row["ContextTokens"]), int(row["GeneratedTokens"])
                if min(num_in, num_out) >= 1 and num_in + num_out <= max_total:
                    # Stamps have seven decimals, Python reads six.
                    stamp = datetime.strptime(row["TIMESTAMP"][:26], "%Y-%m-%d %H:%M:%S.%f")
                    rows.append((stamp, num_in, num_out))
        except (KeyError, TypeError, ValueError) as error:
            raise RequestError(f"{path} is not an Azure LLM inference trace: {error!r} in a row.") from error
    if count > len(rows):
        raise RequestError(f"{path} has {len(rows)} requests of at most {max_total} tokens, {count} were asked for.")
    start = random.Random(seed).randrange(len(rows) - count + 1)
    rows = rows[start : start + count]
    arrivals = [(stamp - rows[0][0]).total_seconds() / speed for stamp, _, _ in rows]
    return _requests([(num_in, num_out) for _, num_in, num_out in rows], arrivals, vocab_size, scale, seed)


def _requests(
    lengths: Sequence[tuple[int, int]], arrivals: Sequence[float], vocab_size: int, scale: float, seed: int
) -> list[ClientRequest]:
    rng = random.Random(seed)
    return [
        ClientRequest(random_prompt(rng, scaled(num_in, scale), vocab_size), scaled(num_out, scale), arrival)
        for (num_in, num_out), arrival in zip(lengths, arrivals, strict=True)
    ]


def scaled(length: int, scale: float) -> int:
    """A length times `scale`, at least 1."""
    return max(round(length * scale), 1)


def read_file(path: str | Path) -> list[ClientRequest]:
    """The requests of a file: {"requests": [{"prompt_ids": [int], "max_new_tokens": int, "arrival_s": float}]}.

    Raises:
        RequestError: It is something else, or holds no requests.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))["requests"]
        requests = [
            ClientRequest(tuple(map(int, one["prompt_ids"])), int(one["max_new_tokens"]), one.get("arrival_s", 0.0))
            for one in found
        ]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise RequestError(f"{path} is not a request file: {error!r}.") from error
    if not requests or any(not one.prompt or one.num_outputs < 1 for one in requests):
        raise RequestError(f"{path} must hold requests of at least one token in and one out.")
    return requests
