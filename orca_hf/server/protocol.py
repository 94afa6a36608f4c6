"""What clients send: OpenAI's requests, with vLLM's additions where generate() has the same."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

TokenId = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(min_length=1)]
# A constraint, even an empty one, is what makes pydantic look whether a string is text: half a surrogate pair is none.
Text = Annotated[str, StringConstraints(min_length=0)]
Name = Annotated[str, StringConstraints(max_length=256)]
StopString = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Finite = {"allow_inf_nan": False}

MAX_CHOICES = 128
MAX_LOGPROBS = 20


def _as_token_biases(value: Any) -> Any:
    """OpenAI's token ids are the keys of a JSON object, and so text."""
    if not isinstance(value, dict):
        return value
    return {int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key: value[key] for key in value}


Bias = Annotated[float, Field(ge=-100, le=100, **Finite)]
LogitBias = Annotated[dict[TokenId, Bias], BeforeValidator(_as_token_biases), Field(max_length=1024)]


class _Request(BaseModel):
    # What is not understood is refused: an option that is dropped in silence gives another answer than was asked for.
    model_config = ConfigDict(extra="forbid")


class StreamOptions(_Request):
    """How a stream is to be written."""

    include_usage: bool = False
    continuous_usage_stats: bool = False  # vLLM's: with include_usage, each chunk says what was used so far
    include_obfuscation: bool = False


class JsonSchema(_Request):
    """A schema that an answer follows."""

    name: Name = "answer"
    description: Text | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(_Request):
    """What an answer looks like."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class GenerationRequest(_Request):
    """What completions and chat completions have in common."""

    model: Name | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=64)] | None = None
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

    prompt: Text | TokenIds | Annotated[list[Text | TokenIds], Field(min_length=1, max_length=1024)]
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool = False
    best_of: int | None = None
    suffix: Text | None = None


class TextPart(_Request):
    """A piece of a message."""

    type: Literal["text"]
    text: Text


class Message(_Request):
    """One message of a chat."""

    role: Annotated[str, StringConstraints(min_length=1, max_length=64)]
    content: Text | list[TextPart] | None = None
    name: Text | None = None
    refusal: Text | None = None


class ChatRequest(GenerationRequest):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none"] | None = None
    parallel_tool_calls: bool | None = None


class TokenizeRequest(_Request):
    """`POST /tokenize`: a prompt, or the messages of a chat."""

    model: Name | None = None
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool = True


class DetokenizeRequest(_Request):
    """`POST /detokenize`."""

    model: Name | None = None
    tokens: list[TokenId]
