"""Special tokens in what clients write, as plain text: only the chat template and the tokenizer make real ones."""

import copy
import re
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedTokenizerBase

from orca_hf.server.errors import ApiError, bad_request

Conversation = list[dict[str, str]]
_PRIVATE = range(0xF0000, 0xFFFFE)  # characters that stand for nothing: Unicode's supplementary private use area


class PlainText:
    """Encodes text in which the names of special tokens are text.

    Args:
        tokenizer: The model's. It is copied: fast tokenizers keep whether they split special tokens as a state, which
            must not change while another thread encodes.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._splitting: Any = copy.deepcopy(tokenizer)
        added = tokenizer.added_tokens_decoder.items()
        self._ids = {token.content: index for index, token in added if token.special and token.content}
        # The longest first, as tokenizers look for them.
        names = sorted(self._ids, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, names)) or r"(?!)")
        # A token for what the tokenizer does not know is no instruction to the model.
        self._forbidden = set(self._ids.values()) - {tokenizer.unk_token_id}

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The tokens of a text.

        Raises:
            ApiError: The tokenizer knows no other way to write a special token's name than by that token.
        """
        tokens = self._encode(text)
        if self._forbidden.intersection(tokens):
            raise _cannot_be_plain()
        return list(self._splitting(text, split_special_tokens=True).input_ids) if add_special_tokens else tokens

    def of_chat(self, conversation: Conversation, render: Callable[[Conversation], str]) -> list[int]:
        """The tokens of a chat.

        In what clients write a character that stands for nothing takes the place of each special token's name while
        the template is rendered, so that the names found afterwards are the template's. Tokenizers cut a text at
        special tokens and encode what is between them; so does this, with the names put back.

        Args:
            conversation: As templates take it.
            render: Of the template.

        Raises:
            ApiError: As for `encode`, or the template refuses the conversation.
        """
        texts = [text for message in conversation for text in message.values()]
        found = sorted({name for text in texts for name in self._special.findall(text)})
        if not found:
            return self._plainly(render(conversation))
        template = str(self._tokenizer.chat_template)
        taken = set(template).union(*texts)
        free = (chr(code) for code in _PRIVATE if chr(code) not in taken)
        stand_ins = dict(zip(found, free, strict=False))
        hidden = [
            {key: self._special.sub(lambda match: stand_ins[match[0]], text) for key, text in message.items()}
            for message in conversation
        ]
        text = render(hidden)
        # Some tokenizers treat a text's beginning, or the space beside a special token, differently: with them pieces
        # joined are not the whole. That is seen where there are no names to hide.
        if self._joined(text, {}) != self._plainly(text):
            raise _cannot_be_plain()
        return self._joined(text, {stand_in: name for name, stand_in in stand_ins.items()})

    def _joined(self, text: str, names: dict[str, str]) -> list[int]:
        back = str.maketrans(names)
        tokens: list[int] = []
        start = 0
        for match in self._special.finditer(text):
            tokens += [*self._piece(text[start : match.start()].translate(back)), self._ids[match[0]]]
            start = match.end()
        return tokens + self._piece(text[start:].translate(back))

    def _piece(self, text: str) -> list[int]:
        return self.encode(text, add_special_tokens=False) if text else []

    def _encode(self, text: str) -> list[int]:
        return list(self._splitting(text, add_special_tokens=False, split_special_tokens=True).input_ids)

    def _plainly(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False).input_ids)


def _cannot_be_plain() -> ApiError:
    return bad_request(
        "A text of the request has the name of a special token, which this model's tokenizer cannot write as text, and "
        "this server lets clients write no special tokens. Take it out."
    )
