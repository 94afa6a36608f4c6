"""The server without HTTP: requests in, running answers out."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from orca_hf.server.answers import Answer, Answers
from orca_hf.server.errors import ApiError, bad_request
from orca_hf.server.limits import Limits, Ticket
from orca_hf.server.logprobs import Logprob, TokenTexts, as_logprob
from orca_hf.server.metrics import Metrics
from orca_hf.server.options import Options, OptionsReader, max_new_tokens
from orca_hf.server.prompts import chat_prompt, completion_prompts, num_prompts
from orca_hf.server.protocol import ChatRequest, CompletionRequest, GenerationRequest
from orca_hf.server.settings import ServerSettings
from orca_hf.server.structured import Grammars
from orca_hf.server.text import decode

T = TypeVar("T")
Echo = tuple[str, list[Logprob]]


class Service:
    """One model and what the requests to it share. Used on the event loop.

    Args:
        engine: Of `orca_hf.engine`.
        tokenizer: The model's.
        settings: The operator's.
    """

    def __init__(self, engine: Any, tokenizer: PreTrainedTokenizerBase, settings: ServerSettings) -> None:
        model: PreTrainedModel = engine.model
        self.engine = engine
        self.tokenizer = tokenizer
        self.settings = settings
        self.limits = Limits(settings.max_open, settings.max_per_client)
        self.metrics = Metrics(engine.stats)
        self.texts = TokenTexts(tokenizer)
        vocab_size = model.config.get_text_config().vocab_size
        self.options = OptionsReader(model, vocab_size, Grammars(tokenizer, vocab_size, _eos_token_ids(model)))
        self._running: set[Answers] = set()
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
        num_answers = options.num_answers * (num_prompts(request) if isinstance(request, CompletionRequest) else 1)
        ticket = self.limits.admit(client, num_answers)
        answers: list[Answer] = []
        try:
            prompts, submissions = await self.prepare(self._prepare_request, request, options)
            if self.limits.closing:
                raise ApiError(503, "The server is shutting down.", code="shutting_down")
            for submission in submissions:
                handle = None if submission is None else self.engine.submit(**submission)
                answers.append(Answer(len(answers), prompts[len(answers) // options.num_answers], handle))
        except BaseException:
            for answer in answers:
                if answer.handle is not None:
                    answer.handle.cancel()
            ticket.give_back()
            raise
        made = Answers(
            answers,
            self.tokenizer,
            stops=options.stops,
            with_logprobs=options.logprobs is not None,
            on_close=lambda closed: self._closed(closed, ticket),
        )
        self._running.add(made)
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
        for answers in list(self._running):
            answers.fail(ApiError(503, "The server is shutting down.", code="shutting_down"))

    def close(self) -> None:
        """Ends the threads; the engine is its owner's."""
        self._preparing.shutdown()
        self._looking.shutdown()

    def _prepare_request(
        self, request: GenerationRequest, options: Options
    ) -> tuple[list[list[int]], list[dict[str, Any] | None]]:
        """Prompts, and what to submit for each answer; None where an answer has no tokens."""
        if isinstance(request, ChatRequest):
            prompts = [chat_prompt(self.tokenizer, request.messages)]
        else:
            assert isinstance(request, CompletionRequest)
            prompts = completion_prompts(self.tokenizer, request)
        submissions: list[dict[str, Any] | None] = []
        for prompt in prompts:
            if not prompt:
                raise bad_request("The prompt has no tokens.", "prompt")
            length = max_new_tokens(request, prompt, self.settings.max_model_len, self.settings.default_max_tokens)
            for _ in range(options.num_answers):
                submission = {
                    "input_ids": prompt,
                    "max_new_tokens": length,
                    "seed": options.seed_of(len(submissions)),
                    "logprobs": options.logprobs,
                    "logits_processor": options.make_processors(len(prompt)),
                    **options.generate_kwargs,
                }
                submissions.append(submission if length else None)
        return prompts, submissions

    def _closed(self, answers: Answers, ticket: Ticket) -> None:
        self._running.discard(answers)
        ticket.give_back()
        for answer in answers.answers:
            if answer.handle is not None:
                self.metrics.ended(answer.handle.timings, answer.num_tokens)


def _eos_token_ids(model: PreTrainedModel) -> list[int]:
    ids = model.generation_config.eos_token_id
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
