"""Log-probabilities in OpenAI's two forms: completions' columns, and chat's rows."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

_FLOOR = -9999.0  # OpenAI's word for minus infinity, which JSON does not have
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_BYTES_BY_CHAR = {char: byte for byte, char in bytes_to_unicode().items()}


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token and how likely it was.

    Attributes:
        token: Its id.
        logprob: Under the model's own logits; None for a prompt's first token, before which there is nothing.
        top: The most likely tokens at its place, ids and log-probabilities, the likeliest first.
    """

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


def as_logprob(token: int, entry: Any) -> Logprob:
    """The engine's entry for `token`; None where nothing stands before it."""
    return Logprob(token, None) if entry is None else Logprob(token, entry.logprob, tuple(entry.top))


class TokenTexts:
    """What single tokens are called in answers.

    Args:
        tokenizer: The model's.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def text(self, token: int) -> str:
        """A token's text with its leading space, special tokens by name; what is no character as its bytes."""
        text = self._decode(token)
        if "\ufffd" not in text:
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.data(token))

    def data(self, token: int) -> bytes:
        """A token's bytes, which alone need not be characters."""
        name, text = self._name(token), self._decode(token)
        if found := _BYTE.fullmatch(name):
            return bytes([int(found[1], 16)])
        if "\ufffd" in text and all(char in _BYTES_BY_CHAR for char in name):
            return bytes(_BYTES_BY_CHAR[char] for char in name)
        return text.encode()

    def _name(self, token: int) -> str:
        name = self._tokenizer.convert_ids_to_tokens(token)
        return name if isinstance(name, str) else ""

    def _decode(self, token: int) -> str:
        text = self._tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        # A decoder takes the space from the first word of a text, and here every token is one.
        return f" {text}" if self._name(token).startswith("▁") and not text.startswith(" ") else text


def completion_logprobs(texts: TokenTexts, entries: Sequence[Logprob], offset: int) -> dict[str, Any]:
    """Columns: tokens, their log-probabilities, the likeliest at each place, where each begins in the text.

    Args:
        texts: Names tokens.
        entries: The tokens.
        offset: Characters before the first of them.
    """
    names = [texts.text(entry.token) for entry in entries]
    offsets = list(accumulate(map(len, names), initial=offset))
    return {
        "tokens": names,
        "token_logprobs": [None if entry.logprob is None else _finite(entry.logprob) for entry in entries],
        "top_logprobs": [_top(texts, entry) for entry in entries],
        "text_offset": offsets[:-1],
    }


def _top(texts: TokenTexts, entry: Logprob) -> dict[str, float] | None:
    if entry.logprob is None:
        return None
    # The token itself is always among them; where names are equal, the likelier token's stands.
    pairs = [(entry.token, entry.logprob), *reversed(entry.top)]
    return {texts.text(token): _finite(logprob) for token, logprob in sorted(pairs, key=lambda pair: pair[1])}


def chat_logprobs(texts: TokenTexts, entries: Sequence[Logprob]) -> dict[str, Any]:
    """Rows: each token with its bytes, its log-probability, and the likeliest at its place."""
    content = []
    for entry in entries:
        top = [_row(texts, token, logprob) for token, logprob in entry.top]
        content.append({**_row(texts, entry.token, entry.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def _row(texts: TokenTexts, token: int, logprob: float | None) -> dict[str, Any]:
    return {"token": texts.text(token), "logprob": _finite(logprob), "bytes": list(texts.data(token))}


def _finite(logprob: float | None) -> float:
    return _FLOOR if logprob is None or not math.isfinite(logprob) else max(logprob, _FLOOR)
