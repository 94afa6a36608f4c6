"""From logits to tokens: one generate() call's rows, with the processors and criteria that generate() built for it."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from orca_hf.random_state import DefaultGenerator
from orca_hf.request import Request, RequestState
from orca_hf.sampling_options import SamplingOptions
from orca_hf.warping import RowProbabilities, faster, stack_size, warped_probabilities


class Accepted(NamedTuple):
    """What an iteration brought one row.

    Attributes:
        request: The row.
        tokens: Its next tokens: one, and more where guesses at them were right.
        over: Whether it has ended.
    """

    request: Request
    tokens: Sequence[int]
    over: bool


class Streamer(Protocol):
    """What generate() asks of a streamer."""

    def put(self, value: Tensor) -> None:
        """Take the next tokens, on the CPU."""

    def end(self) -> None:
        """No more tokens will come."""


class Listener(Protocol):
    """Who reads a submitted request of one row; called by whoever drives, mostly under the lock, so it must be quick.

    Attributes:
        wants_logits: Whether `weigh` is to be called.
    """

    wants_logits: bool

    def weigh(self, logits: Tensor, token: int) -> None:
        """See the raw logits, (vocab_size,), of which `token` was made; not under the lock."""

    def catch_up(self, tokens: Sequence[int]) -> None:
        """Take what it does not have yet of all tokens so far."""

    def ended(self) -> None:
        """No more tokens will come: the call is done. Not under the lock if there is a streamer. May come twice."""

    def let_go(self) -> None:
        """Release every lock that the calling thread still holds of it: it was interrupted."""

    def wake(self) -> None:
        """Nobody drives any more."""


class Generation:
    """One generate() call while it is served: its rows as requests, and what becomes of them.

    Rows run independently, each leaving when it is done, unless someone looks at several of them together: a user's
    own logits processor or criterion, a streamer of several rows, recorded scores, or the random draws of a sampled
    call. Then they go in *lockstep*: a row whose next logits are there waits for its siblings, and one step of the
    native loop is taken over all of them, so that everybody sees what native generate() shows.

    Args:
        input_ids: (num_rows, prompt_len) as the caller gave them, padding included.
        prompts: Each row's own tokens, without padding.
        options: What to do with the logits.
        streamer: Gets the tokens as they come, or None.
        lockstep: Whether the rows go in lockstep.
        seed: Of the random draws, which are then those after `torch.manual_seed(seed)`; None follows the default
            generator.
        has_foreign_streamer: The streamer is a user's own, which may draw random numbers.
        runs_users_code: Somebody's own processor, criterion or streamer runs, which may write into the model.

    Attributes:
        listener: Who reads the only row of a submitted request; None where a thread waits for the whole call.
        deadline: When to end it, on the engine's clock, or None.
    """

    def __init__(
        self,
        input_ids: Tensor,
        prompts: Sequence[Sequence[int]],
        options: SamplingOptions,
        *,
        streamer: Streamer | None = None,
        lockstep: bool = False,
        seed: int | None = None,
        has_foreign_streamer: bool = False,
        runs_users_code: bool = False,
    ) -> None:
        self.options = options
        self.runs_users_code = runs_users_code
        self.listener: Listener | None = None
        self.deadline: float | None = None
        self.streamer = streamer
        self.lockstep = lockstep
        self.error: BaseException | None = None
        self.scores: list[Tensor] = []
        self.logits: list[Tensor] = []
        self.kv_states: list[tuple[Tensor, Tensor]] | None = None
        num_rows, self.prompt_len = input_ids.shape
        self.max_new_tokens = options.max_new_tokens(self.prompt_len)
        self.requests = [Request(prompt, self.max_new_tokens, owner=self) for prompt in prompts]
        self._row_of = {id(request): row for row, request in enumerate(self.requests)}
        self._eos = options.eos_token_ids
        self._pad = 0 if options.pad_token_id is None else options.pad_token_id  # None only where no row needs any
        self._unfinished = set(range(num_rows))
        # The same as native generate() keeps it: (num_rows,) of 1 and 0, or of what shape a user's criterion makes it.
        self._going = torch.ones(num_rows, dtype=torch.long, device=input_ids.device)
        self._num_open = num_rows
        self._held: dict[int, Tensor] = {}
        self._greedy = options.is_plain_greedy and not lockstep
        self._sampling = options.is_plain_sampling and not lockstep
        # On other devices random numbers depend on how many are drawn together.
        self._draws_in_parts = options.is_plain_sampling and input_ids.device.type == "cpu"
        self._generator: DefaultGenerator | None = None
        may_draw = options.has_foreign_code or has_foreign_streamer
        if options.do_sample or (seed is not None and may_draw):
            num_streams = 1 if lockstep else num_rows
            self._generator = DefaultGenerator(input_ids.device, num_streams, shared=may_draw, seed=seed)
        self._input_ids = input_ids
        self._inference_mode = torch.is_inference_mode_enabled()
        # The rows as processors and criteria are shown them; (num_rows, longest) int64.
        self._ids: Tensor | None = None
        if not (self._greedy or self._sampling):
            shape = (num_rows, self.prompt_len + self.max_new_tokens)
            self._ids = torch.full(shape, self._pad, dtype=torch.long, device=input_ids.device)
            self._ids[:, : self.prompt_len] = input_ids

    @property
    def is_plain_greedy(self) -> bool:
        """Whether `accept_tokens` may be used in place of `accept_logits`."""
        return self._greedy

    @property
    def is_plain_sampling(self) -> bool:
        """Whether `want_probabilities` and `draw_tokens` are to be used in place of `accept_logits`."""
        return self._sampling

    @property
    def may_guess(self) -> bool:
        """Whether a row may get several tokens from an iteration: one that need not wait for its siblings."""
        return not self.lockstep

    @property
    def done(self) -> bool:
        """Whether all rows have ended and hold their last token, or the call failed."""
        return self.error is not None or self._num_open == 0

    @property
    def can_repeat(self) -> bool:
        """Whether a turn that was interrupted may be taken again: the same tokens come, and nobody has seen them."""
        wants_logits = self.listener is not None and self.listener.wants_logits
        return self._greedy and self.streamer is None and not wants_logits

    def begin_anew(self) -> list[Request]:
        """Have the rows that have not ended ready to be submitted again, with the tokens that they have.

        Returns:
            Them.
        """
        self._held.clear()  # all rows come to their logits again
        unfinished = []
        for request in self.requests:
            ended = self.error is not None or self._has_ended(request)
            request.reset()
            if ended:
                request.state = RequestState.FINISHED
            else:
                unfinished.append(request)
        self._num_open = len(unfinished)
        return unfinished

    def _has_ended(self, request: Request) -> bool:
        if request.finished or not (self._greedy or self._sampling):
            return request.finished
        generated = request.generated
        return len(generated) == self.max_new_tokens or (bool(generated) and generated[-1] in self._eos)

    def row_ended(self) -> None:
        """A row has got its last token."""
        self._num_open -= 1

    def fail(self, error: BaseException) -> None:
        """End the call with `error`, which its caller will see; the first error stands."""
        if not self.done:
            self.error = error
        self._held.clear()

    def close(self, *, discard: bool = False) -> None:
        """Leave the default random generator where native generate() would have, or where it was if `discard`."""
        if self._generator is not None:
            self._generator.close(discard=discard)

    def accept_tokens(
        self, requests: Sequence[Request], tokens: Sequence[Sequence[int]], num_ahead: int = 0
    ) -> list[Accepted]:
        """Takes the next tokens of some rows of a plain call, for each row one or more.

        `num_ahead` tokens of each row are accepted already that its request does not have yet.
        """
        accepted = []
        for request, chosen in zip(requests, tokens, strict=True):
            last = next((i for i, token in enumerate(chosen) if token in self._eos), len(chosen) - 1)
            taken = chosen[: last + 1]
            num_generated = len(request.generated) + num_ahead + len(taken)
            over = taken[-1] in self._eos or num_generated == self.max_new_tokens
            accepted.append(Accepted(request, taken, over))
            if self.streamer is not None:
                with self._callers_mode():
                    for token in taken:
                        self.streamer.put(torch.tensor([token], dtype=torch.long, device="cpu"))
        return accepted

    def want_probabilities(self, rows: list[int], probabilities: RowProbabilities) -> None:
        """Announce the rows of an iteration's logits for which `draw_tokens` will be called."""
        probabilities.want(rows, self.options.processors, self._input_ids.device)

    def draw_tokens(self, requests: Sequence[Request], rows: list[int], probabilities: RowProbabilities) -> list[int]:
        """Draws the next token of each of some requests, whose logits are in these rows of the iteration's."""
        assert self._generator is not None
        draws = []
        for request, row in zip(requests, rows, strict=True):
            probs = probabilities.take(row, self.options.processors, self._input_ids.device)
            draws.append(self._generator.draw(probs, stream=self._row_of[id(request)]))
        return torch.cat(draws).tolist() if draws else []  # one wait for the device, however many rows there are

    def accept_logits(self, requests: Sequence[Request], logits: Tensor, num_ahead: int = 0) -> list[Accepted]:
        """Takes the next logits of some rows: (len(requests), vocab_size). `num_ahead` as for `accept_tokens`.

        Returns:
            One entry for each row that got a token; in lockstep that is none until all rows are there, and then all.
        """
        own_random = nullcontext() if self._generator is None else self._generator.in_place()
        with self._callers_mode(), own_random:
            return self._accept_logits([self._row_of[id(request)] for request in requests], logits, num_ahead)

    @contextmanager
    def _callers_mode(self) -> Iterator[None]:
        """A user's code runs in whichever thread drives, but in the mode that its caller would have run it in."""
        with torch.inference_mode(self._inference_mode), torch.no_grad():
            yield

    def _accept_logits(self, rows: list[int], logits: Tensor, num_ahead: int) -> list[Accepted]:
        if self.lockstep:
            awaited = set(range(len(self.requests))) if self.options.needs_all_rows else self._unfinished
            if self._held or set(rows) < awaited:
                # A copy: the logits of the others in the iteration need not be held with them.
                self._held.update(zip(rows, logits.clone(), strict=True))
                if self._held.keys() < awaited:
                    return []
                rows = sorted(self._held)
                logits = torch.stack([self._held[row] for row in rows])
                self._held = {}
        accepted: list[Accepted] = []
        for length in sorted({len(self.requests[row].generated) for row in rows}):
            chosen = [i for i, row in enumerate(rows) if len(self.requests[row].generated) == length]
            part = logits if len(chosen) == len(rows) else logits[chosen]
            accepted += self._step([rows[i] for i in chosen], self.prompt_len + length + num_ahead, part)
        return accepted

    def _step(self, rows: list[int], length: int, logits: Tensor) -> list[Accepted]:
        """The body of native generate()'s loop, over `rows`, which are all `length` tokens long."""
        assert self._ids is not None
        options = self.options
        every_row = len(rows) == len(self.requests)
        ids = self._ids if every_row else self._ids[rows]
        shown = self._shown(ids, length)
        if self._draws_in_parts and every_row:
            tokens = self._draw_in_parts(logits)
        else:
            logits = logits.to(copy=True, dtype=torch.float32, device=ids.device)
            processors = options.processors if every_row else _for_rows(options.processors, rows)
            scores = LogitsProcessorList(map(faster, processors))(shown, logits)  # type: ignore[arg-type]
            if options.has_foreign_code:
                ids[:, :length] = shown  # natively what a user's processor writes into the tokens stays there
            if options.output_scores:
                self.scores.append(scores)
            if options.output_logits:
                self.logits.append(logits)
            tokens = self._draw(rows, scores) if options.do_sample else torch.argmax(scores, dim=-1)
        going = self._going if every_row else self._going[rows]
        if options.ends_by_eos:
            tokens = tokens * going + self._pad * (1 - going)
        if options.has_foreign_code:
            # Natively so, and thus with native's errors where a processor returned scores of another shape or device.
            torch.cat([shown, tokens[:, None]], dim=-1)
        ids[:, length] = tokens
        if not every_row:
            self._ids[rows, length] = tokens
        streamed = None if self.streamer is None else self._ids[:, length].to("cpu", copy=True)
        judged = rows
        if options.has_foreign_code and not every_row:
            judged, ids, going = list(range(len(self.requests))), self._ids, self._going
        shown = self._shown(ids, length + 1)
        over = options.criteria(shown, tuple(self.scores) if options.output_scores else None)
        if options.has_foreign_code:
            ids[:, : length + 1] = shown
            tokens = self._ids[rows, length]  # natively the next forward reads what a user's criterion has written
        self._end_rows(judged, going & ~over)
        if self.streamer is not None and streamed is not None:
            self.streamer.put(streamed)
        leaving = set(rows) - self._unfinished
        if options.needs_all_rows and self._unfinished:
            leaving = set()
        return [
            Accepted(self.requests[row], [token], row in leaving)
            for row, token in zip(rows, tokens.tolist(), strict=True)
        ]

    def _end_rows(self, rows: list[int], going: Tensor) -> None:
        """Note which of `rows` go on: those of which `going` is not 0."""
        if going.shape == (len(rows),):
            if len(rows) == len(self.requests):
                self._going = going
            else:
                self._going[rows] = going
            self._unfinished -= {row for row, value in zip(rows, going.tolist(), strict=True) if value == 0}
        else:
            # A criterion of shape (num_rows, 1), as transformers documents it: natively that leaves a square, and all
            # rows go on until nothing of it does; beside an EOS token, the next step then raises. The lockstep of
            # foreign code has seen to it that all rows are here.
            self._going = going
            if going.max() == 0:  # as natively, where nothing has no maximum
                self._unfinished.clear()

    def _shown(self, ids: Tensor, length: int) -> Tensor:
        """The first `length` tokens, for processors and criteria: a user's may want them in one piece, or keep them."""
        if not self.options.has_foreign_code:
            return ids[:, :length]
        dtype = self._input_ids.dtype if length == self.prompt_len else torch.long  # natively until a token is joined
        return ids[:, :length].contiguous().to(dtype)

    def _draw_in_parts(self, logits: Tensor) -> Tensor:
        """The next tokens of all rows, a few at a time, that stay in the cache; their random numbers follow on."""
        assert self._generator is not None
        parts = logits.split(stack_size(logits.shape[1]))
        return torch.cat([self._generator.draw(warped_probabilities(part, self.options.processors)) for part in parts])

    def _draw(self, rows: list[int], scores: Tensor) -> Tensor:
        probs = torch.nn.functional.softmax(scores, dim=-1)
        assert self._generator is not None
        if not self.lockstep:
            draws = [self._generator.draw(probs[i : i + 1], stream=row) for i, row in enumerate(rows)]
            return torch.cat(draws)
        if len(rows) < len(self.requests):
            # Natively a row that ended still takes its share of the random numbers, and its draw is thrown away.
            everyone = probs.new_ones((len(self.requests), probs.shape[1]))
            everyone[rows] = probs
            return self._generator.draw(everyone)[rows]
        return self._generator.draw(probs)

    def sequences(self) -> Tensor:
        """(num_rows, longest row) token ids as generate() returns them: prompts, tokens, padding."""
        longest = max(len(request.generated) for request in self.requests)
        if self._ids is not None:
            return self._ids[:, : self.prompt_len + longest].clone()
        rows = [request.generated + [self._pad] * (longest - len(request.generated)) for request in self.requests]
        new_tokens = torch.tensor(rows, dtype=torch.long, device=self._input_ids.device)
        return torch.cat([self._input_ids, new_tokens], dim=-1)


def _for_rows(processors: LogitsProcessorList, rows: list[int]) -> LogitsProcessorList:
    """The processors as generate() would have built them for `rows` alone."""
    chosen = LogitsProcessorList()
    for processor in processors:
        # The one row-by-row processor that keeps something for each row: how much padding is in front of it.
        ignored = getattr(processor, "prompt_ignore_length", None)
        if isinstance(ignored, Tensor):
            processor = copy.copy(processor)
            processor.prompt_ignore_length = ignored[rows]
        chosen.append(processor)
    return chosen


def greedy_tokens(logits: Tensor) -> list[int]:
    """Tokens of the largest logits: (num_rows, vocab_size), the lowest of equals.

    In fp32, as natively: rounding to a narrower dtype has happened already, so the maximum is the same one.
    """
    logits = logits.float()
    if type(logits) is Tensor and logits.device.type == "cpu":
        # The same index, for equals and NaN too, in a tenth of the time that PyTorch's takes over a large vocabulary.
        tokens: list[int] = logits.numpy().argmax(axis=-1).tolist()
        return tokens
    return torch.argmax(logits, dim=-1).tolist()
