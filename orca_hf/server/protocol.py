"""What clients send: OpenAI's requests, with vLLM's additions where generate() has the same.

`null` means left out, everywhere. Fields that are not here are judged by `extra_fields`.
"""

import re
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError

TokenId = Annotated[int, Field(strict=True, ge=0, lt=2**31)]


def _not_too_long(value: Any, info: ValidationInfo) -> Any:
    """Refuses what cannot fit before each of its tokens is looked at; how many can be is the operator's to say."""
    limit = (info.context or {}).get("max_tokens")
    if limit is not None and isinstance(value, list) and len(value) > limit:
        raise PydanticCustomError("too_long", "Input should have at most {limit} tokens", {"limit": limit})
    return value


TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True), BeforeValidator(_not_too_long)]
# A constraint, even an empty one, is what makes pydantic look whether a string is text: half a surrogate pair is none.
Text = Annotated[str, StringConstraints(min_length=0)]
Name = Annotated[str, StringConstraints(max_length=256)]
StopString = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Finite = {"allow_inf_nan": False}

_INTEGER = re.compile(r"-?[0-9]{1,20}")

MAX_BIASES = 1024
MAX_CHOICES = 128
MAX_LOGPROBS = 20

# Which of several forms a value has is decided by its JSON type, and what is wrong is then said of that form only. The
# brackets tell these names from fields, where errors name the place of a fault.
_TEXT, _TOKENS, _LIST = "<text>", "<tokens>", "<list>"


def _text_or_list(value: Any) -> str | None:
    return _TEXT if isinstance(value, str) else _LIST if isinstance(value, list) else None


def _text_or_tokens(value: Any) -> str | None:
    return _TEXT if isinstance(value, str) else _TOKENS if isinstance(value, list) else None


def _prompt_form(value: Any) -> str | None:
    first = value[0] if isinstance(value, list) and value else None
    return _TOKENS if isinstance(first, int | float) and not isinstance(first, bool) else _text_or_list(value)


def _one_of(form: Any, allowed: str) -> Discriminator:
    return Discriminator(form, custom_error_type="form", custom_error_message=f"Input should be {allowed}")


def _without_nulls(value: Any) -> Any:
    return {key: each for key, each in value.items() if each is not None} if isinstance(value, dict) else value


def _as_token_biases(value: Any) -> Any:
    """OpenAI's token ids are the keys of a JSON object, and so text."""
    if not isinstance(value, dict):
        return value
    if len(value) > MAX_BIASES:  # before each is judged: pydantic notes the faults of all
        raise PydanticCustomError("too_long", "Input should have at most {limit} tokens", {"limit": MAX_BIASES})
    given = _without_nulls(value)
    return {int(key) if isinstance(key, str) and _INTEGER.fullmatch(key) else key: given[key] for key in given}


Bias = Annotated[float, Field(ge=-100, le=100, **Finite)]
LogitBias = Annotated[dict[TokenId, Bias], BeforeValidator(_as_token_biases), Field(max_length=MAX_BIASES)]
Stops = Annotated[
    Annotated[StopString, Tag(_TEXT)]
    | Annotated[list[StopString], Field(max_length=64, fail_fast=True), Tag(_LIST)],
    _one_of(_text_or_list, "a text or a list of texts"),
]  # fmt: skip
OnePrompt = Annotated[
    Annotated[Text, Tag(_TEXT)] | Annotated[TokenIds, Tag(_TOKENS)],
    _one_of(_text_or_tokens, "a text or a list of token ids"),
]
Prompts = Annotated[
    Annotated[Text, Tag(_TEXT)]
    | Annotated[TokenIds, Tag(_TOKENS)]
    | Annotated[list[OnePrompt], Field(min_length=1, max_length=1024, fail_fast=True), Tag(_LIST)],
    _one_of(_prompt_form, "a text, a list of token ids, or a list of such prompts"),
]


class Fields(BaseModel):
    """A JSON object of a request."""

    model_config = ConfigDict(extra="allow")

    @model_validator(mode="before")
    @classmethod
    def _null_is_left_out(cls, value: Any) -> Any:
        return _without_nulls(value)


class StreamOptions(Fields):
    """How a stream is to be written."""

    include_usage: bool = False
    continuous_usage_stats: bool = False  # vLLM's: with include_usage, each chunk says what was used so far
    include_obfuscation: bool = False


class JsonSchema(Fields):
    """A schema that an answer follows."""

    name: Name = "answer"
    description: Text | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Fields):
    """What an answer looks like."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ModelRequest(Fields):
    """What all requests have in common."""

    model: Name | None = None


class GenerationRequest(ModelRequest):
    """What completions and chat completions have in common."""

    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: Stops | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2, **Finite)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, **Finite)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1, **Finite)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2, **Finite)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2, **Finite)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100, **Finite)] | None = None
    logit_bias: LogitBias | None = None
    response_format: ResponseFormat | None = None
    ignore_eos: bool = False
    # What says nothing about the tokens.
    user: Text | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: Text | None = None
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None


class CompletionRequest(GenerationRequest):
    """`POST /v1/completions`."""

    prompt: Prompts
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool = False
    best_of: int | None = None
    suffix: Text | None = None


class TextPart(Fields):
    """A piece of a message. The longer names are those of OpenAI's Responses API."""

    type: Literal["text", "input_text", "output_text"]
    text: Text


class RefusalPart(Fields):
    """A piece of a message in which the model has refused to answer."""

    type: Literal["refusal"]
    refusal: Text

    @property
    def text(self) -> str:
        """What was said."""
        return self.refusal


def _part_form(value: Any) -> str | None:
    return ("<refusal>" if value.get("type") == "refusal" else _TEXT) if isinstance(value, dict) else None


_PART_TYPES = ("text", "input_text", "output_text", "refusal")


def _only_text(value: Any) -> Any:
    """Tells who sends an image what is wrong with it, rather than what pydantic misses in it."""
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind not in _PART_TYPES:
        raise PydanticCustomError(
            "no_text",
            "Input should be of type 'text', since this model takes text only, and not of type {kind}",
            {"kind": repr(kind[:64])},
        )
    return value


Part = Annotated[
    Annotated[TextPart, Tag(_TEXT)] | Annotated[RefusalPart, Tag("<refusal>")],
    _one_of(_part_form, "a part of a message, such as {'type': 'text', 'text': '...'}"),
    BeforeValidator(_only_text),
]
Content = Annotated[
    Annotated[Text, Tag(_TEXT)] | Annotated[list[Part], Field(fail_fast=True), Tag(_LIST)],
    _one_of(_text_or_list, "a text or a list of parts"),
]


class Message(Fields):
    """One message of a chat. What a server has answered is one too, with all that it has beside its text."""

    role: Annotated[str, StringConstraints(min_length=1, max_length=64)]
    content: Content | None = None
    name: Text | None = None
    refusal: Text | None = None
    reasoning_content: Text | None = None  # which some templates write
    tool_call_id: Text | None = None  # likewise


Messages = Annotated[list[Message], Field(min_length=1, fail_fast=True)]


class ChatRequest(GenerationRequest):
    """`POST /v1/chat/completions`."""

    messages: Messages
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None


class TokenizeRequest(ModelRequest):
    """`POST /tokenize`: a prompt, or the messages of a chat."""

    prompt: Text | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True


class DetokenizeRequest(ModelRequest):
    """`POST /detokenize`."""

    tokens: Annotated[list[TokenId], Field(fail_fast=True), BeforeValidator(_not_too_long)]
