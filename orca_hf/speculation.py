"""Speculative decoding by prompt lookup: guesses at the next tokens, judged by the model itself.

While few requests run, an iteration takes as long as reading the weights does, and some more rows cost next to nothing.
So a request that repeats its prompt or itself gets more than one token from an iteration: where its last tokens have
stood before, what followed them then is computed along. Of these guesses those stay that the model itself chose, up to
the first that it did not, whose place its own choice takes. So the tokens are those without guessing.
"""

import sys
from collections.abc import Sequence
from itertools import takewhile

from orca_hf.request import Request
from orca_hf.scheduler import Iteration, Step

# Rows of an iteration up to which one more costs less than what a guess brings: on two cores, SmolLM2-135M takes as
# long for 8 rows as for one, a third more for 16, and from there on as much for each as for those before.
_MAX_ROWS = 16
_NGRAMS = (3, 2)  # tokens that must have stood there before, the longer the better
# A request's guesses in an iteration: they double while all are right.
_FIRST_LENGTH, _MAX_LENGTH = 3, 8
# Of each request's guesses the share that was right of late is known; below the limit it guesses no more for a while.
_MEMORY = 0.8
_TOO_OFTEN_WRONG = 0.5
_RECOVERY = 0.01  # an iteration


class Speculation:
    """An engine's guesses.

    Args:
        num_tokens: Guesses for a request in an iteration at most; None for as many as pay.
    """

    def __init__(self, num_tokens: int | None) -> None:
        self._num_tokens = num_tokens
        self._drafters: dict[int, _Drafter] = {}  # of the last iteration's requests

    def extend(self, iteration: Iteration, *, pays: bool, max_tokens: int | None) -> Iteration:
        """The iteration with guesses.

        Args:
            iteration: What the scheduler chose.
            pays: Whether rows are cheap where it runs.
            max_tokens: The iteration's limit of tokens, or None.
        """
        if self._num_tokens == 0 or (self._num_tokens is None and not pays):
            return iteration
        limits = [max_tokens, _MAX_ROWS if self._num_tokens is None else None]
        room = min((limit for limit in limits if limit is not None), default=sys.maxsize) - iteration.num_tokens
        if room <= 0:
            return iteration
        known, self._drafters = self._drafters, {}
        steps = []
        for step in iteration.steps:
            request = step.request
            if step.samples and request.owner.may_guess:
                drafter = self._drafters[request.request_id] = known.get(request.request_id) or _Drafter(request)
                most = drafter.length if self._num_tokens is None else self._num_tokens
                # The last token needs no guess after it.
                draft = drafter.guess(min(most, room, request.max_new_tokens - len(request.generated) - 1))
                if draft:
                    room -= len(draft)
                    step = Step(request, step.start, step.length + len(draft), samples=True, draft=draft)
            steps.append(step)
        return Iteration(tuple(steps))

    def judge(self, step: Step, tokens: Sequence[int]) -> Sequence[int]:
        """What a step brings its request: guesses that were right, and the token after them.

        Args:
            step: The step.
            tokens: (step.num_samples,) tokens that the model chose: after the last known one, and after each guess.
                Those after a guess that is wrong, or that ends the row, may be missing.
        """
        right = takewhile(lambda pair: pair[0] == pair[1], zip(step.draft, tokens, strict=False))
        num_right = sum(1 for _ in right)
        drafter = self._drafters.get(step.request.request_id)
        if drafter is not None:
            drafter.learn(len(step.draft), num_right)
        return tokens[: num_right + 1]


class _Drafter:
    """Guesses for one request.

    Attributes:
        length: How many of them pay at a time.
    """

    def __init__(self, request: Request) -> None:
        self.length = _FIRST_LENGTH
        self._request = request
        self._tokens = list(request.prompt)
        self._num_indexed = 0
        self._followed_by: dict[tuple[int, ...], int] = {}  # n-grams to the place after their last occurrence
        self._share_right = 1.0

    def guess(self, num_tokens: int) -> tuple[int, ...]:
        """As many tokens as asked for, or none: those that followed the last time the last few tokens stood there."""
        if num_tokens <= 0:
            return ()
        if self._share_right < _TOO_OFTEN_WRONG:
            self._share_right += _RECOVERY
            return ()
        tokens = self._known_tokens()
        for size in _NGRAMS:
            place = self._followed_by.get(tuple(tokens[-size:]))
            if place is not None:
                period = len(tokens) - place  # past the end it begins again: so it goes where a text runs in circles
                return tuple([tokens[place + i % period] for i in range(num_tokens)])
        return ()

    def learn(self, num_guesses: int, num_right: int) -> None:
        """Note how many guesses of an iteration were right."""
        self._share_right = _MEMORY * self._share_right + (1 - _MEMORY) * num_right / num_guesses
        if num_right < num_guesses:
            self.length = max(_FIRST_LENGTH, num_right)
        elif num_guesses >= self.length:
            self.length = min(2 * self.length, _MAX_LENGTH)

    def _known_tokens(self) -> list[int]:
        tokens = self._tokens
        tokens += self._request.generated[len(tokens) - len(self._request.prompt) :]
        for place in range(self._num_indexed, len(tokens)):
            for size in _NGRAMS:
                if place >= size:
                    self._followed_by[tuple(tokens[place - size : place])] = place
        self._num_indexed = len(tokens)
        return tokens
