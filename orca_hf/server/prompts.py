"""Prompts of every form, as token ids."""

from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from orca_hf.server.errors import ApiError, bad_request, shortened
from orca_hf.server.plain_text import PlainText
from orca_hf.server.protocol import CompletionRequest, Message

_BEGINNING = 2**14  # characters of a text that are encoded before the rest is looked at
_MAX_WORDS = 500  # characters of a template's error, which may quote all that it was given


class Prompts:
    """Makes the token ids of prompts, for one model.

    Args:
        tokenizer: The model's.
        vocab_size: Token ids that the model takes.
        max_tokens: Of a text, roughly: one that has clearly more is refused before all of it is encoded.
        special_tokens_in_text: Whether the text of a special token becomes that token where a client writes it.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        vocab_size: int,
        max_tokens: int,
        *,
        special_tokens_in_text: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._vocab_size = vocab_size
        self._plain = None if special_tokens_in_text else PlainText(tokenizer)

    def of_text(self, text: str, place: str = "prompt", *, add_special_tokens: bool = True) -> list[int]:
        """The tokens of a text.

        Raises:
            ApiError: They are far more than the model takes.
        """
        self._refuse_if_long(text, place)
        if self._plain is not None:
            return self._plain.encode(text, add_special_tokens=add_special_tokens)
        return list(self._tokenizer(text, add_special_tokens=add_special_tokens).input_ids)

    def of_completion(self, prompt: str | list[int], index: int | None) -> list[int]:
        """The tokens of one of a completion's prompts.

        Args:
            prompt: Text or tokens.
            index: Which one; None where there is one that is not in a list.

        Raises:
            ApiError: It has no tokens, or one that the model does not have.
        """
        place = place_of(index)
        tokens = prompt if isinstance(prompt, list) else self.of_text(prompt, place)
        if not tokens:
            words = "The prompt" if index is None else place
            raise bad_request(f"{words} has no tokens; give at least one (for instance the BOS token).", place)
        if (largest := max(tokens)) >= self._vocab_size:
            last = self._vocab_size - 1
            raise bad_request(f"{place} has token id {largest}, but the model's vocabulary is 0 to {last}.", place)
        return tokens

    def of_chat(self, messages: list[Message]) -> list[int]:
        """The tokens that the model's chat template makes of `messages`, up to where the answer begins.

        Raises:
            ApiError: There is no template, or it refuses these messages.
        """
        if not self._tokenizer.chat_template:
            raise bad_request("This model has no chat template; use /v1/completions.", "messages")
        conversation = [_as_dict(message) for message in messages]
        if self._plain is not None:
            return self._plain.of_chat(conversation, self._render)
        # Special tokens are the template's to write.
        return self.of_text(self._render(conversation), "messages", add_special_tokens=False)

    def _render(self, conversation: list[dict[str, str]]) -> str:
        try:
            text: Any = self._tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # a template is a program of the model's, and fails in any way on what it is given
            raise _refused(error) from error
        assert isinstance(text, str)
        self._refuse_if_long(text, "messages")
        return text

    def _refuse_if_long(self, text: str, place: str) -> None:
        """Looks at beginnings of a text, each longer than the last: the whole has about as many tokens, and more."""
        length = _BEGINNING
        while length < len(text):
            if len(self._tokenizer(text[:length], add_special_tokens=False).input_ids) > self._max_tokens:
                message = f"{place} has more than {self._max_tokens} tokens; this model takes fewer. Shorten it."
                raise bad_request(message, place, "context_length_exceeded")
            length *= 4


def place_of(index: int | None) -> str:
    """Where in a completion one of its prompts is."""
    return "prompt" if index is None else f"prompt[{index}]"


def completion_prompts(request: CompletionRequest) -> list[tuple[str | list[int], int | None]]:
    """A completion's prompts, one or several, each as text or as tokens, with its place in the list if it is in one."""
    given: Any = request.prompt
    if isinstance(given, list) and not isinstance(given[0], int):
        return [(prompt, i) for i, prompt in enumerate(given)]
    return [(given, None)]


def _refused(error: Exception) -> ApiError:
    # Of other errors it matters too what they are: a KeyError says nothing but the key.
    words = str(error) if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {error}"
    shown = shortened(words, _MAX_WORDS)
    return bad_request(f"The model's chat template refuses these messages: {shown}", "messages")


def _as_dict(message: Message) -> dict[str, str]:
    """The form that templates know: contents as one text, and of the rest what was given."""
    content = message.content
    text = content if isinstance(content, str) else "".join(part.text for part in content or ())
    rest = {name: getattr(message, name) for name in ("name", "reasoning_content", "tool_call_id")}
    given = {name: value for name, value in rest.items() if value is not None}
    return {"role": message.role, "content": text or message.refusal or "", **given}
