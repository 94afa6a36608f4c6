"""Prompts of every form, as token ids."""

from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from orca_hf.server.errors import bad_request
from orca_hf.server.protocol import CompletionRequest, Message


def completion_prompts(tokenizer: PreTrainedTokenizerBase, request: CompletionRequest) -> list[list[int]]:
    """The prompts of a completion: one or several, as text or as tokens."""
    given = request.prompt
    several: list[Any] = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
    return [prompt if isinstance(prompt, list) else encode(tokenizer, prompt) for prompt in several]


def num_prompts(request: CompletionRequest) -> int:
    """How many prompts a completion has."""
    given = request.prompt
    return len(given) if isinstance(given, list) and not isinstance(given[0], int) else 1


def encode(tokenizer: PreTrainedTokenizerBase, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """The tokens of a text."""
    return list(tokenizer(text, add_special_tokens=add_special_tokens).input_ids)


def chat_prompt(tokenizer: PreTrainedTokenizerBase, messages: list[Message]) -> list[int]:
    """The tokens that the model's chat template makes of `messages`, up to where the answer begins.

    Raises:
        ApiError: There is no template, or it refuses these messages.
    """
    if not tokenizer.chat_template:
        raise bad_request("This model has no chat template; use /v1/completions.", "messages")
    conversation = [_as_dict(message) for message in messages]
    try:
        text = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        raise bad_request(f"The model's chat template refuses these messages: {error}", "messages") from error
    assert isinstance(text, str)
    return encode(tokenizer, text, add_special_tokens=False)  # the template writes them


def _as_dict(message: Message) -> dict[str, str]:
    """The form that templates know: contents as one text."""
    content = message.content
    text = content if isinstance(content, str) else "".join(part.text for part in content or ())
    named = {} if message.name is None else {"name": message.name}
    return {"role": message.role, "content": text, **named}
