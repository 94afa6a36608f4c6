"""The server without HTTP: requests in, running answers out."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from orca_hf.errors import StoppedError
from orca_hf.runner import input_device
from orca_hf.server.answers import Answer, Answers
from orca_hf.server.errors import ApiError, bad_request
from orca_hf.server.limits import Limits, Ticket
from orca_hf.server.logprobs import Logprob, TokenTexts, as_logprob
from orca_hf.server.metrics import Metrics
from orca_hf.server.options import Options, OptionsReader, max_new_tokens
from orca_hf.server.prompts import Prompts, completion_prompts
from orca_hf.server.protocol import ChatRequest, CompletionRequest, GenerationRequest
from orca_hf.server.settings import ServerSettings
from orca_hf.server.structured import Grammars
from orca_hf.server.text import decode
from orca_hf.serving import RequestHandle, ServingEngine

T = TypeVar("T")
Echo = tuple[str, list[Logprob]]


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
        vocab_size = model.config.get_text_config().vocab_size
        self.options = OptionsReader(model, vocab_size, Grammars(tokenizer, vocab_size, _eos_token_ids(model)))
        self.prompts = Prompts(tokenizer, vocab_size, special_tokens_in_text=settings.special_tokens_in_text)
        self._device = input_device(model)
        self._running: set[Answers] = set()
        self._is_over = False
        # One thread: tokenizers are not made for several, and templates and schemas of clients get no more than this.
        self._preparing = ThreadPoolExecutor(1, "orca-prepare")
        self._looking = ThreadPoolExecutor(1, "orca-prompts")

    def check_model(self, name: str | None) -> None:
        """Refuses a request for another model.

        Raises:
            ApiError: `name` is not this model's.
        """
        if name is not None and name not in self.settings.model_names:
            own = ", ".join(self.settings.model_names)
            raise ApiError(404, f"There is no model {name!r} here, but {own}.", param="model", code="model_not_found")

    async def prepare(self, work: Callable[..., T], *args: Any) -> T:
        """Runs what takes a while on the preparing thread."""
        return await asyncio.get_running_loop().run_in_executor(self._preparing, work, *args)

    async def start(self, request: GenerationRequest, client: str) -> tuple[Answers, Options, list[list[int]]]:
        """Submits a request to the engine. Whoever calls it closes the answers.

        Returns:
            The answers, what they were asked for with, and the prompts.

        Raises:
            ApiError: It is refused, whole.
            OrcaError: The engine refuses it.
        """
        self.check_model(request.model)
        options = self.options.read(request)
        num_prompts = len(completion_prompts(request)) if isinstance(request, CompletionRequest) else 1
        num_answers = options.num_answers * num_prompts
        ticket = self.limits.admit(client, num_answers)
        try:
            prompts, answers = await self.prepare(self._submit, request, options)
        except BaseException:
            ticket.give_back()  # handles that nobody has any more cancel themselves
            raise
        made = Answers(
            answers,
            self.tokenizer,
            stops=options.stops,
            with_logprobs=options.logprobs is not None,
            on_close=lambda closed: self._closed(closed, ticket),
        )
        self._running.add(made)
        if self._is_over:
            made.fail(_shutting_down())
        return made, options, prompts

    async def echoes(self, request: CompletionRequest, options: Options, prompts: list[list[int]]) -> list[Echo]:
        """The prompts as answers begin with them, if the request wants that."""
        if not request.echo:
            return []
        texts = [
            request.prompt if isinstance(request.prompt, str) else await self.prepare(decode, self.tokenizer, prompt)
            for prompt in prompts
        ]
        if options.logprobs is None:
            return [(text, []) for text in texts]
        loop = asyncio.get_running_loop()
        looked = [
            await loop.run_in_executor(self._looking, self.engine.prompt_logprobs, prompt, options.logprobs)
            for prompt in prompts
        ]
        return [
            (text, [as_logprob(token, entry) for token, entry in zip(prompt, entries, strict=True)])
            for text, prompt, entries in zip(texts, prompts, looked, strict=True)
        ]

    def stop_running(self) -> None:
        """Ends all requests that are still open, telling their clients why."""
        self._is_over = True
        for answers in list(self._running):
            answers.fail(_shutting_down())

    def close(self) -> None:
        """Ends the threads; the engine is its owner's."""
        self._preparing.shutdown()
        self._looking.shutdown()

    def _submit(self, request: GenerationRequest, options: Options) -> tuple[list[list[int]], list[Answer]]:
        """Prompts, and an answer for each that is wanted, on its way in the engine."""
        if isinstance(request, ChatRequest):
            prompts = [self.prompts.of_chat(request.messages)]
        else:
            assert isinstance(request, CompletionRequest)
            prompts = [self.prompts.of_completion(*each) for each in completion_prompts(request)]
        limits = self.settings.max_model_len, self.settings.default_max_tokens
        lengths = [max_new_tokens(request, prompt, *limits) for prompt in prompts]
        answers: list[Answer] = []
        for prompt, length in zip(prompts, lengths, strict=True):
            for _ in range(options.num_answers):
                handle = self._submit_one(options, prompt, length, len(answers)) if length else None
                answers.append(Answer(len(answers), prompt, handle))
        return prompts, answers

    def _submit_one(self, options: Options, prompt: list[int], length: int, answer: int) -> RequestHandle:
        try:
            return self.engine.submit(
                prompt,
                # Otherwise generate() takes a pad token in the prompt for padding, and a template may end turns by it.
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long, device=self._device),
                max_new_tokens=length,
                seed=options.seed_of(answer),
                logprobs=options.logprobs,
                logits_processor=options.make_processors(len(prompt)),
                **options.generate_kwargs,
            )
        except StoppedError as error:
            raise ApiError(503, "The engine takes no requests.", code="not_ready") from error
        except ValueError as error:  # generate() refuses the options
            raise bad_request(str(error)) from error

    def _closed(self, answers: Answers, ticket: Ticket) -> None:
        self._running.discard(answers)
        ticket.give_back()
        for answer in answers.answers:
            if answer.handle is not None and answer.ended is not None:
                self.metrics.ended(answer.handle.timings, answer.ended, answer.num_tokens)


def _shutting_down() -> ApiError:
    return ApiError(503, "The server is shutting down.", code="shutting_down")


def _eos_token_ids(model: PreTrainedModel) -> list[int]:
    ids = model.generation_config.eos_token_id
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
