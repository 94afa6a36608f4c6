"""A request's options as generate()'s: keyword arguments, logits processors, stop strings."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from orca_hf.server.errors import bad_request
from orca_hf.server.processors import LogitBias, OpenAIPenalties
from orca_hf.server.protocol import ChatRequest, CompletionRequest, GenerationRequest, ResponseFormat
from orca_hf.server.structured import Grammar

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's
# Logits are divided by temperatures and penalties, and natively those near zero make infinities of them, and no numbers
# of these. Below this the likeliest token has all the probability anyway, whatever the number is; and divided by both,
# by a bias too, logits stay far from the end of fp32.
_LEAST = 1e-15


@dataclass(frozen=True, slots=True)
class Options:
    """What one request asks for, apart from its prompts.

    Attributes:
        generate_kwargs: For generate(); what a request leaves out is the model's own.
        make_processors: A prompt's length and the answer's grammar to the processors of one answer, in the order in
            which they apply.
        stops: Strings that end an answer, and are no part of it.
        seed: Of the first answer's draws; each further one has the next.
        num_answers: For each prompt.
        format: Of structured answers; None for free text.
        logprobs: Most likely tokens to name at each position; None for no log-probabilities at all.
    """

    generate_kwargs: dict[str, Any]
    make_processors: Callable[[int, Grammar | None], LogitsProcessorList | None]
    stops: tuple[str, ...]
    seed: int | None
    num_answers: int
    format: ResponseFormat | None
    logprobs: int | None

    def seed_of(self, answer: int) -> int | None:
        """The seed of one of the answers."""
        return None if self.seed is None else self.seed + answer


class OptionsReader:
    """Translates requests for one model.

    Args:
        model: It.
        vocab_size: Token ids that it has logits for.
    """

    def __init__(self, model: PreTrainedModel, vocab_size: int) -> None:
        self._model = model
        self._vocab_size = vocab_size

    def read(self, request: GenerationRequest) -> Options:
        """The options of `request`; how long its answers may be depends on the prompt, and comes later.

        Raises:
            ApiError: Something in it cannot be done, or contradicts itself.
        """
        self._check(request)
        wanted = request.response_format
        stops = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
        return Options(
            generate_kwargs=self._generate_kwargs(request),
            make_processors=self._processors(request),
            stops=stops,
            seed=request.seed,
            num_answers=request.n or 1,
            format=None if wanted is None or wanted.type == "text" else wanted,
            logprobs=_num_logprobs(request),
        )

    def _check(self, request: GenerationRequest) -> None:
        if request.stream_options is not None and not request.stream:
            raise bad_request("stream_options are for streams; set stream to true.", "stream_options")
        for token in request.logit_bias or ():
            if token >= self._vocab_size:
                last = self._vocab_size - 1
                raise bad_request(f"logit_bias has token {token}, but the last one is {last}.", "logit_bias")
        if request.response_format is not None and request.ignore_eos:
            raise bad_request("A structured answer ends by itself, which ignore_eos forbids.", "ignore_eos")
        if isinstance(request, CompletionRequest):
            if request.suffix:
                raise bad_request("suffix is not supported: the model continues its prompt only.", "suffix")
            if request.best_of not in (None, request.n or 1):
                raise bad_request(f"best_of is {request.best_of}, but must equal n, or be left out.", "best_of")
        if isinstance(request, ChatRequest) and request.top_logprobs is not None and not request.logprobs:
            raise bad_request("top_logprobs are only given with logprobs; set it to true.", "top_logprobs")

    def _generate_kwargs(self, request: GenerationRequest) -> dict[str, Any]:
        kwargs: dict[str, Any] = {}
        if request.temperature == 0:
            kwargs["do_sample"] = False
        elif request.temperature is not None:
            kwargs |= {"do_sample": True, "temperature": max(request.temperature, _LEAST)}
        if request.top_k is not None:
            kwargs["top_k"] = max(request.top_k, 0)  # vLLM's -1 is generate()'s 0: all
        for name in ("top_p", "min_p"):
            if getattr(request, name) is not None:
                kwargs[name] = getattr(request, name)
        if request.repetition_penalty is not None:
            kwargs["repetition_penalty"] = max(request.repetition_penalty, _LEAST)
        if kwargs.get("do_sample") is False:
            for name in ("top_k", "top_p", "min_p"):
                kwargs.pop(name, None)  # without effect, and generate() would warn of them
        if request.ignore_eos:
            kwargs["eos_token_id"] = self._vocab_size  # a token that never comes
            if self._model.generation_config.pad_token_id is None:
                kwargs["pad_token_id"] = 0  # or generate() takes eos_token_id for it
        return kwargs

    def _processors(self, request: GenerationRequest) -> Callable[[int, Grammar | None], LogitsProcessorList | None]:
        presence, frequency = request.presence_penalty or 0, request.frequency_penalty or 0
        # One for all answers: it remembers nothing of them, and is as long as the vocabulary.
        bias = LogitBias(request.logit_bias, self._vocab_size, self._model.device) if request.logit_bias else None

        def make(prompt_len: int, grammar: Grammar | None) -> LogitsProcessorList | None:
            made: list[LogitsProcessor] = []
            if presence or frequency:
                made.append(OpenAIPenalties(prompt_len, presence, frequency))
            if bias is not None:
                made.append(bias)
            if grammar is not None:
                made.append(grammar.processor(prompt_len))
            return LogitsProcessorList(made) or None

        return make


def max_new_tokens(
    request: GenerationRequest, prompt: Sequence[int], place: str, max_model_len: int, default: int
) -> int:
    """How long an answer to `prompt` may be.

    Args:
        request: Which may say it.
        prompt: Tokens.
        place: Where in the request the prompt is.
        max_model_len: Of prompt and answer together.
        default: For a chat that does not say it.

    Raises:
        ApiError: Prompt and answer do not fit.
    """
    asked = request.max_tokens if isinstance(request, CompletionRequest | ChatRequest) else None
    if isinstance(request, ChatRequest):
        asked = asked if request.max_completion_tokens is None else request.max_completion_tokens
    elif asked is None:
        default = DEFAULT_COMPLETION_TOKENS
    room = max_model_len - len(prompt)
    if room < (1 if asked is None else asked):
        wanted = "" if asked is None else f" and asks for {asked} more"
        which = place if "[" in place else "The prompt"
        raise bad_request(
            f"{which} has {len(prompt)} tokens{wanted}; this model takes {max_model_len} together. Shorten one.",
            place,
            "context_length_exceeded",
        )
    return min(default, room) if asked is None else asked


def _num_logprobs(request: GenerationRequest) -> int | None:
    if isinstance(request, ChatRequest):
        return (request.top_logprobs or 0) if request.logprobs else None
    return request.logprobs if isinstance(request, CompletionRequest) else None
