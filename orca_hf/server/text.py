"""Tokens to text as they come: whole characters, the right spaces, and nothing of a stop string."""

import re
from collections.abc import Sequence
from functools import lru_cache

from transformers import PreTrainedTokenizerBase

_UNFINISHED = "\ufffd"  # what a decoder makes of bytes that are no character (yet)
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_CONTEXT = 8  # tokens of the prompt that the first new ones are decoded behind
_MAX_UNFINISHED = 16  # tokens that wait for the end of a character, which has four bytes at most
_MAX_WINDOW = 64  # tokens after which it is looked for a shorter window
_MAX_COUNTED = 64  # tokens whose places in a text that comes at once are found one by one


class Decoder:
    """A model's tokens as text, special ones left out.

    Args:
        tokenizer: The model's.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.items()
        special = {*tokenizer.all_special_ids, *(index for index, token in added if token.special)}
        self._special = frozenset(index for index in special if self.decode([index]) == "")
        self.is_byte = lru_cache(2**16)(self._is_byte)
        self.is_hidden = lru_cache(2**16)(self._is_hidden)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without taking spaces out, which tokens to come could bring back."""
        text = self._tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def text_and_begins(self, tokens: Sequence[int]) -> tuple[str, list[int]]:
        """The text of all tokens, and where in it each begins."""
        detokenizer = Detokenizer(self)
        pieces = [detokenizer.push(token) for token in tokens]
        return "".join([*pieces, detokenizer.flush()]), detokenizer.begins

    def _is_byte(self, token: int) -> bool:
        name = self._tokenizer.convert_ids_to_tokens(token)
        return isinstance(name, str) and _BYTE.fullmatch(name) is not None

    def _is_hidden(self, token: int) -> bool:
        """Whether a token is left out of every text: a special one, or one that the tokenizer does not have."""
        return token in self._special or self._tokenizer.convert_ids_to_tokens(token) is None


class Detokenizer:
    """Decodes one answer token by token; what it has given, joined, is a beginning of the whole answer's text.

    A token's text depends on its neighbours: characters are cut into several tokens, and a space in front belongs to
    a word only if something stands before it. So a few tokens are decoded together with those before them, of which
    the text is known, and what is new is given as soon as it ends in a whole character. A run of byte tokens
    (`<0xE2>`) waits for its end, since sentencepiece's decoders read a run as a whole.

    Args:
        decoder: Of the model's tokens.
        prompt: Tokens before the answer. The text continues theirs, so a leading space stays where one belongs.

    Attributes:
        begins: Where each token's text begins in all that is given, of tokens whose text has been. A token that is left
            out begins where the next one does, and so does each of the tokens that only begin a character.
    """

    def __init__(self, decoder: Decoder, prompt: Sequence[int] = ()) -> None:
        self._decoder = decoder
        self._window = self._context(prompt)  # tokens decoded together
        self._num_known = len(self._window)  # of them, those whose text has been given
        self._known = decoder.decode(self._window)  # their text
        self._num_given = 0  # characters
        self._pending: list[int] = []  # of each token without its `begins`, how many of the window stand before it
        self.begins: list[int] = []

    def push(self, token: int) -> str:
        """The text that is certain now and was not before; often empty."""
        self._pending.append(len(self._window))
        if self._decoder.is_hidden(token):
            if len(self._window) == self._num_known:
                self._count("")
            return ""
        self._window.append(token)
        if self._decoder.is_byte(token):
            return ""
        text = self._decoder.decode(self._window)
        if not text.endswith(_UNFINISHED):
            return self._give(text)
        if len(self._window) - self._num_known < _MAX_UNFINISHED:
            return ""
        return self._give(text, num_held=1)  # the last may become a character; those before it never will

    def flush(self) -> str:
        """What is left when no token follows; bytes that are no character come as U+FFFD."""
        return self._give(self._decoder.decode(self._window))

    def _give(self, text: str, num_held: int = 0) -> str:
        """What is new in the window's text, all but so many characters at its end."""
        if not text.startswith(self._known):
            # The prompt ends within a character, which the answer completes.
            self._known = self._known.rstrip(_UNFINISHED)
        given = text[: len(text) - num_held]
        new = given[len(self._known) :]
        self._count(new)
        # The tokens just read are what the next ones are decoded behind, if they leave a mark of their own: behind a
        # text of nothing a leading space would be taken for the text's beginning, and dropped.
        mark = self._decoder.decode(self._window[self._num_known :])
        if mark.strip(" ") and (not num_held or text.endswith(mark)):
            self._window, self._known = self._window[self._num_known :], mark[: len(mark) - num_held]
        else:
            self._known = given
            if len(self._window) > _MAX_WINDOW:
                self._shorten(text, num_held)
        self._num_known = len(self._window)
        return new

    def _shorten(self, text: str, num_held: int) -> None:
        """Leaves as few tokens in the window as say the same of its text's end: spaces only, say, or broken bytes."""
        for size in range(2 * _CONTEXT, _CONTEXT, -1):
            tail = self._decoder.decode(self._window[-size:])
            if text.endswith(tail) and (len(tail) > num_held or not text):
                self._window, self._known = self._window[-size:], tail[: len(tail) - num_held]
                return

    def _count(self, new: str) -> None:
        """Finds out where the pending tokens begin, now that their text is known."""
        begin = 0
        for place, size in enumerate(self._pending, start=1):
            # Of a long run only the last: each costs a decoding of all before it.
            if size > self._num_known and (len(self._pending) <= _MAX_COUNTED or place == len(self._pending)):
                before = self._decoder.decode(self._window[:size])[len(self._known) :]
                begin = max(begin, _num_common(before, new))  # a run that is cut may be no characters at all
            self.begins.append(self._num_given + begin)
        self._pending.clear()
        self._num_given += len(new)

    def _context(self, prompt: Sequence[int]) -> list[int]:
        shown = [token for token in prompt if not self._decoder.is_hidden(token)]
        length = min(_CONTEXT, len(shown))
        while length < len(shown):
            tail = shown[len(shown) - length :]
            has_mark = length >= _MAX_WINDOW or self._decoder.decode(tail).strip(" ")
            if has_mark and not self._decoder.is_byte(tail[0]):
                break
            length = min(2 * length, len(shown))
        return shown[len(shown) - length :]


def _num_common(first: str, second: str) -> int:
    """Characters at the beginning that two texts have in common."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


class StopStrings:
    """Lets text through up to the first stop string, which may come in pieces.

    Of several the one that is complete first counts, as if the text came character by character.

    Args:
        stops: The strings, none of them empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found = False

    @property
    def holds(self) -> bool:
        """Whether text is held back."""
        return bool(self._held)

    def push(self, text: str) -> str:
        """What may be shown now: never a stop string, nor what may be the beginning of one."""
        if self.found:
            return ""
        self._held += text
        ends = [(start + len(stop), start) for stop in self._stops if (start := self._held.find(stop)) >= 0]
        if ends:
            self.found = True
            _, start = min(ends)
            return self._held[:start]
        keep = max((self._beginning(stop) for stop in self._stops), default=0)
        shown = self._held[: len(self._held) - keep]
        self._held = self._held[len(shown) :]
        return shown

    def flush(self) -> str:
        """What was held back, when nothing follows."""
        held, self._held = self._held, ""
        return "" if self.found else held

    def _beginning(self, stop: str) -> int:
        """Characters at the end of the text that may be the beginning of `stop`."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)
