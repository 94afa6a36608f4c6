"""The server without HTTP: requests in, running answers out."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from orca_hf.errors import StoppedError
from orca_hf.runner import input_device
from orca_hf.server.answers import Answer, Answers
from orca_hf.server.bodies import parse
from orca_hf.server.errors import ApiError, bad_request, shutting_down
from orca_hf.server.extra_fields import ExtraFields
from orca_hf.server.lanes import Lane
from orca_hf.server.limits import Limits, Ticket
from orca_hf.server.logprobs import TokenTexts
from orca_hf.server.metrics import Metrics
from orca_hf.server.options import Options, OptionsReader, max_new_tokens
from orca_hf.server.prompts import Prompts, completion_prompts, place_of
from orca_hf.server.protocol import ChatRequest, CompletionRequest, GenerationRequest, ModelRequest
from orca_hf.server.settings import ServerSettings
from orca_hf.server.structured import Grammar, Grammars
from orca_hf.server.text import Decoder
from orca_hf.serving import ServingEngine

T = TypeVar("T")
Form = TypeVar("Form", bound=ModelRequest)
Prompt = tuple[str | list[int], int | None]

_QUICK = 2**15  # bytes of a body that takes no time to speak of
_WRITTEN = 2**9  # log-probabilities, likewise


@dataclass(frozen=True, slots=True)
class Call:
    """A request that has been admitted.

    Attributes:
        client: Whose it is.
        ticket: Its right to be here, which whoever asked for it gives back.
        lane: Where it is prepared.
        compiling: Where its schema is compiled.
        looking: Where its prompts are looked at by the model.
        writing: Where its answers are written, if they are long.
    """

    client: str
    ticket: Ticket
    lane: Lane
    compiling: Lane
    looking: Lane
    writing: Lane

    async def run(self, work: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Runs a piece of its preparation, in its turn."""
        return await self.lane.run(self.client, work, *args, **kwargs)

    async def compile(self, work: Callable[..., T], *args: Any) -> T:
        """Runs what compiles a schema."""
        return await self.compiling.run(self.client, work, *args)

    async def look(self, work: Callable[..., T], *args: Any) -> T:
        """Runs what waits for the model."""
        return await self.looking.run(self.client, work, *args)

    async def write(self, num_entries: int, work: Callable[..., T], *args: Any) -> T:
        """Runs what writes so many log-probabilities; at once, if they are few."""
        return work(*args) if num_entries <= _WRITTEN else await self.writing.run(self.client, work, *args)


class Service:
    """One model and what the requests to it share. Used on the event loop.

    Args:
        engine: Of `orca_hf.engine`.
        model: The engine's.
        tokenizer: The model's.
        settings: The operator's.
    """

    def __init__(
        self,
        engine: ServingEngine,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        settings: ServerSettings,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.settings = settings
        self.limits = Limits(settings.max_open, settings.max_per_client)
        self.metrics = Metrics(engine.stats)
        self.texts = TokenTexts(tokenizer)
        self.decoder = Decoder(tokenizer)
        vocab_size = model.config.get_text_config().vocab_size
        self.prompts = Prompts(
            tokenizer,
            vocab_size,
            settings.max_text_tokens,
            special_tokens_in_text=settings.special_tokens_in_text,
        )
        self._options = OptionsReader(model, vocab_size)
        self._grammars = Grammars(tokenizer, vocab_size, _eos_token_ids(model))
        self._extras = ExtraFields(strict=settings.strict)
        self._device = input_device(model)
        self._running: set[Answers] = set()
        # A lane for each kind of work by how long a piece of it takes, so that what is quick waits for quick work only:
        # a text, or a schema, can take seconds if its request is large. Then prompts that wait for the model, and
        # answers that are long to write.
        names = ("prepare", "prepare-long", "compile", "compile-long", "look", "write")
        self._lanes = {name: Lane(name) for name in names}
        # Tokenizers may be used by several threads while none changes them, which their first call may do.
        tokenizer("")

    def check_model(self, name: str | None) -> None:
        """Refuses a request for another model.

        Raises:
            ApiError: `name` is not this model's.
        """
        if name is not None and name not in self.settings.model_names:
            own = ", ".join(self.settings.model_names)
            raise ApiError(404, f"There is no model {name!r} here, but {own}.", param="model", code="model_not_found")

    def admit(self, client: str, size: int = 0) -> Call:
        """Lets a request of so many bytes in.

        Raises:
            ApiError: It is too much at once, or the server is shutting down.
        """
        ticket = self.limits.admit(client, 1)
        kinds = ("prepare", "compile") if size <= _QUICK else ("prepare-long", "compile-long")
        return Call(client, ticket, *(self._lanes[name] for name in (*kinds, "look", "write")))

    async def read(self, call: Call, body: bytes, form: type[Form]) -> Form:
        """A request from its body.

        Raises:
            ApiError: It is none, or one that this server does not serve.
        """
        return self._read(body, form) if len(body) <= _QUICK else await call.run(self._read, body, form)

    async def start(self, request: GenerationRequest, call: Call) -> tuple[Answers, Options, list[list[int]]]:
        """Submits a request to the engine. Whoever calls it closes the answers, which gives the ticket back.

        Returns:
            The answers, what they were asked for with, and the prompts.

        Raises:
            ApiError: It is refused, whole.
            OrcaError: The engine refuses it.
        """
        answers: list[Answer] = []
        try:
            options = self._options.read(request)
            given = completion_prompts(request) if isinstance(request, CompletionRequest) else [None]
            call.ticket.widen(options.num_answers * len(given))
            prompts = [await call.run(self._prompt, request, each) for each in given]
            grammar = None
            if options.format is not None:
                grammar = await call.compile(self._grammars.compiled, options.format)
            for prompt, length in prompts:
                for _ in range(options.num_answers):
                    index = len(answers)
                    answers.append(await call.run(self._answer, options, prompt, length, grammar, index))
        except BaseException:
            for answer in answers:
                if answer.handle is not None:
                    answer.handle.cancel()
            call.ticket.give_back()
            raise
        made = Answers(
            answers,
            self.decoder,
            stops=options.stops,
            with_logprobs=options.logprobs is not None,
            on_close=lambda closed: self._closed(closed, call.ticket),
        )
        self._running.add(made)
        return made, options, [prompt for prompt, _ in prompts]

    def stop_running(self) -> None:
        """Ends all requests that are still open, telling their clients why."""
        for lane in self._lanes.values():
            lane.fail(shutting_down())
        for answers in list(self._running):
            answers.fail(shutting_down())

    def close(self) -> None:
        """Ends the threads; the engine is its owner's."""
        for lane in self._lanes.values():
            lane.close()

    def _read(self, body: bytes, form: type[Form]) -> Form:
        request = parse(body, form, self.settings.max_text_tokens)
        self._extras.check(request)
        self.check_model(request.model)
        return request

    def _prompt(self, request: GenerationRequest, given: Prompt | None) -> tuple[list[int], int]:
        """The tokens of one prompt, and how many may follow."""
        if isinstance(request, ChatRequest):
            tokens, place = self.prompts.of_chat(request.messages), "messages"
        else:
            assert given is not None
            tokens, place = self.prompts.of_completion(*given), place_of(given[1])
        limits = self.settings.max_model_len, self.settings.default_max_tokens
        return tokens, max_new_tokens(request, tokens, place, *limits)

    def _answer(self, options: Options, prompt: list[int], length: int, grammar: Grammar | None, index: int) -> Answer:
        """An answer, on its way in the engine."""
        if not length:
            return Answer(index, prompt, None)
        try:
            handle = self.engine.submit(
                prompt,
                # Otherwise generate() takes a pad token in the prompt for padding, and a template may end turns by it.
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long, device=self._device),
                max_new_tokens=length,
                seed=options.seed_of(index),
                logprobs=options.logprobs,
                logits_processor=options.make_processors(len(prompt), grammar),
                **options.generate_kwargs,
            )
        except StoppedError as error:
            raise ApiError(503, "The engine takes no requests.", code="not_ready") from error
        except ValueError as error:  # generate() refuses the options
            raise bad_request(str(error)) from error
        return Answer(index, prompt, handle)

    def _closed(self, answers: Answers, ticket: Ticket) -> None:
        self._running.discard(answers)
        ticket.give_back()
        for answer in answers.answers:
            if answer.handle is not None and answer.ended is not None:
                self.metrics.ended(answer.handle.timings, answer.ended, answer.num_tokens)


def _eos_token_ids(model: PreTrainedModel) -> list[int]:
    ids = model.generation_config.eos_token_id
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
