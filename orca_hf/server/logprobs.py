"""Log-probabilities in OpenAI's two forms: completions' columns, and chat's rows."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

_MAX_REMEMBERED = 2**16  # tokens
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
        offset: Where its text begins in the choice's; a token that is left out of the text begins where the next does.
    """

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()
    offset: int = 0


def as_logprob(token: int, entry: Any, offset: int) -> Logprob:
    """The engine's entry for `token`; None where nothing stands before it."""
    return Logprob(token, None, (), offset) if entry is None else Logprob(token, entry.logprob, entry.top, offset)


class TokenTexts:
    """What single tokens are called in answers. Remembered: an answer may name twenty for each of its own.

    Args:
        tokenizer: The model's.

    Attributes:
        text: A token's text with its leading space, special tokens by name; what is no character as its bytes.
        data: A token's bytes, which alone need not be characters.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self.text = lru_cache(_MAX_REMEMBERED)(self._text)
        self.data = lru_cache(_MAX_REMEMBERED)(self._data)

    def _text(self, token: int) -> str:
        text = self._decode(token)
        if "\ufffd" not in text:
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self._data(token))

    def _data(self, token: int) -> bytes:
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
        name = self._name(token)
        if found := _BYTE.fullmatch(name):
            return bytes([int(found[1], 16)]).decode(errors="replace")
        text = self._tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        # A decoder takes the space from the first word of a text, and here every token is one.
        return f" {text}" if name.startswith("▁") and not text.startswith(" ") else text


def completion_logprobs(texts: TokenTexts, entries: Sequence[Logprob]) -> dict[str, Any]:
    """Columns: tokens, their log-probabilities, the likeliest at each place, where each begins in the text."""
    named = [_named(texts, entry) for entry in entries]
    return {
        "tokens": [name for name, _ in named],
        "token_logprobs": [None if entry.logprob is None else _finite(entry.logprob) for entry in entries],
        "top_logprobs": [top for _, top in named],
        "text_offset": [entry.offset for entry in entries],
    }


def _named(texts: TokenTexts, entry: Logprob) -> tuple[str, dict[str, float] | None]:
    """What a token is called, and the likeliest by name, the token itself always among them.

    Of several with one text the likeliest has it as its name. If that is not the token of the answer, then this one is
    called by its id, as vLLM does on demand: whoever looks whether the likeliest was chosen must not be misled.
    """
    name = texts.text(entry.token)
    if entry.logprob is None:
        return name, None
    top: dict[str, float] = {}
    for token, logprob in entry.top:
        text = texts.text(token)
        if text == name and token != entry.token and logprob > entry.logprob:
            name = f"token_id:{entry.token}"
        top.setdefault(text, _finite(logprob))
    top[name] = _finite(entry.logprob)
    return name, top


def chat_logprobs(texts: TokenTexts, entries: Sequence[Logprob]) -> dict[str, Any]:
    """Rows: each token with its bytes, its log-probability, and the likeliest at its place.

    They are made as they are asked for: those of a long answer are more objects than are good to have at once.
    """
    return {"content": (_with_top(texts, entry) for entry in entries), "refusal": None}


def _with_top(texts: TokenTexts, entry: Logprob) -> dict[str, Any]:
    top = [_row(texts, token, logprob) for token, logprob in entry.top]
    return {**_row(texts, entry.token, entry.logprob), "top_logprobs": top}


def _row(texts: TokenTexts, token: int, logprob: float | None) -> dict[str, Any]:
    return {"token": texts.text(token), "logprob": _finite(logprob), "bytes": list(texts.data(token))}


def _finite(logprob: float | None) -> float:
    return _FLOOR if logprob is None or not math.isfinite(logprob) else max(logprob, _FLOOR)
