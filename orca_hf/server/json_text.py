"""Objects as JSON."""

import json
from collections.abc import Iterator
from typing import Any

_DEPTH = 5  # of a choice's log-probabilities: answer, choices, choice, logprobs, content


def as_json(value: Any) -> str:
    """Compact JSON."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def in_pieces(value: Any, depth: int = _DEPTH) -> Iterator[str]:
    """The same text in pieces: each call of Python's writer in C keeps all other threads from running.

    Args:
        value: As `as_json` takes it, or an iterator instead of a list, down to `depth`.
        depth: Of lists and objects that are taken apart.
    """
    if not depth or not isinstance(value, dict | list | Iterator):
        yield as_json(value)
        return
    pairs = value.items() if isinstance(value, dict) else ((None, each) for each in value)
    start, end = "{}" if isinstance(value, dict) else "[]"
    yield start
    separator = ""
    for key, each in pairs:
        yield separator if key is None else f"{separator}{as_json(key)}:"
        yield from in_pieces(each, depth - 1)
        separator = ","
    yield end
