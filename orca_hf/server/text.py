"""Tokens to text as they come: whole characters, the right spaces, and nothing of a stop string."""

import re
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

_UNFINISHED = "\ufffd"  # what a decoder makes of bytes that are no character (yet)
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_CONTEXT = 8  # tokens of the prompt that the first new ones are decoded behind


class Detokenizer:
    """Decodes one answer token by token; what it has given, joined, is a beginning of the whole answer's text.

    A token's text depends on its neighbours: characters are cut into several tokens, and a space in front belongs to
    a word only if something stands before it. So a few tokens are decoded together with those before them, of which
    the text is known, and what is new is given as soon as it ends in a whole character. A run of byte tokens
    (`<0xE2>`) waits for its end, since sentencepiece's decoders read a run as a whole.

    Args:
        tokenizer: The model's.
        prompt: Tokens before the answer. The text continues theirs, so a leading space stays where one belongs.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._window = self._context(prompt)  # tokens decoded together
        self._num_known = len(self._window)  # of them, those whose text has been given
        self._known = self._decode(self._window)  # their text

    def push(self, token: int) -> str:
        """The text that is certain now and was not before; often empty."""
        self._window.append(token)
        if self._is_byte(token):
            return ""
        text = self._decode(self._window)
        return "" if text.endswith(_UNFINISHED) else self._give(text)

    def flush(self) -> str:
        """What is left when no token follows; bytes that are no character come as U+FFFD."""
        return self._give(self._decode(self._window))

    def _give(self, text: str) -> str:
        if not text.startswith(self._known):
            # The prompt ends within a character, which the answer completes.
            self._known = self._known.rstrip(_UNFINISHED)
        new = text[len(self._known) :]
        # The tokens just read are what the next ones are decoded behind, if they leave a mark of their own: behind a
        # text of nothing a leading space would be taken for the text's beginning, and dropped.
        mark = self._decode(self._window[self._num_known :])
        if mark.strip(" "):
            self._window, self._known = self._window[self._num_known :], mark
        else:
            self._known = text
        self._num_known = len(self._window)
        return new

    def _context(self, prompt: Sequence[int]) -> list[int]:
        length = min(_CONTEXT, len(prompt))
        while length < len(prompt):
            tail = prompt[len(prompt) - length :]
            if self._decode(tail).strip(" ") and not self._is_byte(tail[0]):
                break
            length = min(2 * length, len(prompt))
        return list(prompt[len(prompt) - length :])

    def _decode(self, tokens: Sequence[int]) -> str:
        return decode(self._tokenizer, tokens)

    def _is_byte(self, token: int) -> bool:
        name = self._tokenizer.convert_ids_to_tokens(token)
        return isinstance(name, str) and _BYTE.fullmatch(name) is not None


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


def decode(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    """The text of tokens without special ones, and without taking spaces out, which tokens to come could bring back."""
    text = tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text
